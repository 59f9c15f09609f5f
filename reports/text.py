"""Text from outside made fit to show: harmless, not too long, wrapped."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import Any

WIDTH = 100
LONGEST = 2000  # characters of one seen value; a tensor printed in full would drown all else
# Unicode categories: controls, bidi marks and other invisibles, surrogates, private use, line separators.
_HARMFUL = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def harmless(text: str) -> str:
    """The text with control characters, bidi marks and lone surrogates spelled as escapes; newline and tab stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def harmless_data(value: Any) -> Any:
    """JSON-ready data with every string made harmless and every tuple a list."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {harmless(str(key)): harmless_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [harmless_data(item) for item in value]
    return value


def shortened(text: str, limit: int = LONGEST) -> str:
    """At most ``limit`` characters of the text, then how many were left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit:,} more characters)"


def one_line(text: str, limit: int = LONGEST) -> str:
    """Harmless and short, all white space single blanks."""
    return shortened(" ".join(harmless(text).split()), limit)


def labelled(label: str, text: str, *, column: int = 10, prefix: str = "", width: int = WIDTH) -> list[str]:
    """Wrapped lines, the label on the first; the text starts at ``column`` in all of them."""
    first = f"{prefix}{label:<{column}}"
    wrapped = textwrap.wrap(
        one_line(text),
        width=width,
        initial_indent=first,
        subsequent_indent=prefix + " " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [first.rstrip()]


def counted(number: int, noun: str) -> str:
    """``1 program``, ``2,000 programs``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in _HARMFUL:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
