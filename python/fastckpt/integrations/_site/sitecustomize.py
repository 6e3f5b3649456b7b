"""Below ``fastckpt run``, each Python process imports this as it starts: a framework gets its door when it is imported.

``PYTHONPATH`` names this directory. Nothing of fastckpt is imported before a framework is.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

#: Doors, by the module whose import they follow.
_DOORS = {"transformers.trainer": "transformers"}


def _import_the_next() -> None:
    """Import the ``sitecustomize`` that this one hides."""
    here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if Path(entry) != here]
    ours = sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    if ours is not None:
        sys.modules.setdefault("sitecustomize", ours)


def _install(module: Any) -> None:
    importlib.import_module(f"fastckpt.integrations.{_DOORS[module.__name__]}").install()


_import_the_next()
# A Python without wrapt is none that fastckpt was installed into.
with contextlib.suppress(ImportError):
    import wrapt

    for _name in _DOORS:
        wrapt.register_post_import_hook(_install, _name)
