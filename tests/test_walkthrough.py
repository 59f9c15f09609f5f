"""The page that brings up a new device, followed to the letter in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # minutes, and a compiler; by name: pytest tests -m slow

PAGE = Path(__file__).parents[1] / "docs" / "add-a-device.md"
LIMIT = 500


def test_page_can_be_followed(tmp_path: Path) -> None:
    """Each command is run as it stands; what it prints has the lines that the page shows; the broken device is named."""
    blocks = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    told, codes = "", []
    for kind, text in blocks:
        if kind == "text":
            assert [line for line in text.splitlines() if line.strip() not in told] == []
            continue
        words = shlex.split(text)
        assert words[0] == "autograd-conformance"
        command = [sys.executable, "-m", "autograd_conformance.cli", *words[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT
        )
        told = done.stdout + done.stderr
        codes.append(done.returncode)
    assert codes == [0, 0, 0, 1], told
    (script,) = (tmp_path / "conformance-report" / "repro" / "mine").glob("*.py")
    assert "my_backend.init('mine', fault='stale-second-pass')" in script.read_text()
    rerun = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        timeout=LIMIT,
    )
    assert rerun.returncode == 1
