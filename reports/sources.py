"""Where promises are made: each source as a text with a link to the page that it names."""

from __future__ import annotations

import re

DOCS = "https://docs.pytorch.org/docs/stable/"
CPP = "https://docs.pytorch.org/cppdocs/"
# Names that are documented on the page of their module; the others have a page of their own.
_MODULES = {
    "torch.autograd.graph.": "autograd.html",
    "torch.autograd.function.FunctionCtx": "autograd.html",
    "torch.autograd.forward_ad.": "autograd.html",
    "torch.utils.checkpoint.": "checkpoint.html",
    "torch.utils.data.": "data.html",
}
_PAGES = {
    "tutorial Understanding requires_grad, retain_grad": (
        "https://docs.pytorch.org/tutorials/beginner/understanding_leaf_vs_nonleaf_tutorial.html"
    ),
    "PyTorch 0.4 migration guide": "https://pytorch.org/blog/pytorch-0_4_0-migration-guide/",
}
_SOURCE = re.compile(r"(docs cpp|docs|docstring|note) ([\w./]+)")


def source_link(source: str) -> str:
    """The address of the page that a source names, the place of a note on our own page, or an empty text."""
    found = _SOURCE.match(source)
    if found is None:
        return next((page for start, page in _PAGES.items() if source.startswith(start)), "")
    kind, name = found.group(1), found.group(2).rstrip(".").removesuffix(".md")
    if kind == "note":
        return f"#seeds-{name}"
    if kind == "docstring":
        return DOCS + _docstring(name)
    return f"{CPP if kind == 'docs cpp' else DOCS}{name}.html"


def web_link(link: str) -> str:
    """The link if a click on it leads to the web, else an empty text: no other scheme is followed."""
    return link if re.fullmatch(r"https?://[^\s\"'<>\\]+", link) else ""


def _docstring(name: str) -> str:
    for prefix, page in _MODULES.items():
        if name.startswith(prefix):
            return f"{page}#{name}"
    return f"generated/{name}.html"
