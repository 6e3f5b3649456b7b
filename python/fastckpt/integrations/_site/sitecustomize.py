"""Installs integrations on import of their frameworks: each Python process of ``fastckpt run`` imports this first.

``PYTHONPATH`` names this directory. No module of fastckpt is imported before a framework is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

#: Integrations, by the module whose import triggers them.
_DOORS = {"accelerate.accelerator": "accelerate", "transformers.trainer": "transformers"}


def _import_the_next() -> None:
    """Import the ``sitecustomize`` that this one hides."""
    here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if Path(entry) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except Exception as error:  # noqa: BLE001 - as Python does, which goes on without it
        if getattr(error, "name", None) != "sitecustomize":
            traceback.print_exc()
    sys.modules.setdefault("sitecustomize", ours)


def _tell(framework: str, why: object) -> None:
    sys.stderr.write(f"fastckpt run: {framework} saves as it does without fastckpt: {why}\n")


def _install(module: Any) -> None:
    try:
        importlib.import_module(f"fastckpt.integrations.{_DOORS[module.__name__]}").install()
    except Exception as error:  # noqa: BLE001 - the program goes on, and its user is told
        framework = module.__name__.partition(".")[0]
        version = getattr(importlib.import_module(framework), "__version__", "")
        _tell(f"{framework} {version}", repr(error))


_import_the_next()
for _name in _DOORS:
    _framework = _name.partition(".")[0]
    # The program may run in an environment without fastckpt, or without the packages needed here.
    _lacking = [_one for _one in ("fastckpt", "wrapt") if importlib.util.find_spec(_one) is None]
    if not _lacking:
        import wrapt

        wrapt.register_post_import_hook(_install, _name)
    elif importlib.util.find_spec(_framework) is not None:
        _tell(_framework, f"{sys.executable} has no {_lacking[0]}")
