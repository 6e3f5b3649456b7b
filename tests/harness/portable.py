"""In this process fastckpt reads with the portable reader, as on a laptop, and saves with the compiled core.

``FASTCKPT_TEST_PORTABLE=1 PYTHONPATH=tests python -m pytest -p harness tests/...`` runs tests of reading so.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path

NAME = "fastckpt._core"


class Finder:
    """Finds the Python module in the place of the compiled one, as if that were missing."""

    @staticmethod
    def find_spec(name, path, _target=None):
        if name != NAME:
            return None
        source = Path(path[0], "_core.py")
        return importlib.util.spec_from_file_location(name, source, loader=SourceFileLoader(name, str(source)))


def install():
    if NAME in sys.modules:
        raise AssertionError("fastckpt was imported too early")
    sys.meta_path.insert(0, Finder)
    import fastckpt
    from fastckpt._api import save

    (compiled,) = Path(fastckpt.__file__).parent.glob("_core*.so")
    spec = importlib.util.spec_from_file_location(NAME, compiled, loader=ExtensionFileLoader(NAME, str(compiled)))
    save._core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(save._core)
    assert fastckpt._core.__file__.endswith("_core.py")


install()
