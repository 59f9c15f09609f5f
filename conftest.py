"""Lets a bare checkout run under the installed import name. Does nothing once the package is installed."""

import importlib.util
import sys
from pathlib import Path

NAME = "autograd_conformance"

if importlib.util.find_spec(NAME) is None:
    root = Path(__file__).parent
    folder = root / "conformance"
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder), str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pytest_plugins = [f"{NAME}.plugin"]
