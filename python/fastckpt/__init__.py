"""Durable, atomic checkpoints of training state, in the open safetensors format.

>>> fastckpt.save(state, "step-1000")        # durable and whole when it returns
>>> state = fastckpt.load("step-1000")       # the same nested structure, tensors and all

save_async saves while training continues, and open reads single tensors. ``Manager`` keeps the checkpoints of a run.
All ranks of a job call fastckpt.distributed, or fastckpt.dcp through torch.distributed.checkpoint. fastckpt.tools plans
checkpoints and diagnoses storage. On the command line, see fastckpt --help; fastckpt top shows live which rank is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core, exceptions
from fastckpt._api import log as _log
from fastckpt._api.checkpoint import open as open
from fastckpt._api.files import Files
from fastckpt._api.io import IO
from fastckpt._api.load import load
from fastckpt._api.manage import clean, remove
from fastckpt._api.manage import list as list
from fastckpt._api.randomness import randomness
from fastckpt._api.register import Registry, register_type
from fastckpt._api.save import save
from fastckpt._api.verify import verify
from fastckpt._state.rename import strip_prefix
from fastckpt.exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    StructureMismatchError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt import background as background
    from fastckpt import dcp as dcp
    from fastckpt import distributed as distributed
    from fastckpt import integrations as integrations
    from fastckpt import keep as keep
    from fastckpt import tools as tools
    from fastckpt import types as types
    from fastckpt import when as when
    from fastckpt._api.copy import copy as copy
    from fastckpt._api.single_file import open_read as open_read
    from fastckpt._api.single_file import open_write as open_write
    from fastckpt._background.save_async import save_async
    from fastckpt._manager.manager import Manager

#: ``from fastckpt import *`` must not hide Python's own ``copy``, ``list`` and ``open``, nor import torch.
__all__ = [
    "IO",
    "CheckpointError",
    "CorruptCheckpointError",
    "Files",
    "Manager",
    "Registry",
    "StructureMismatchError",
    "__version__",
    "clean",
    "exceptions",
    "load",
    "randomness",
    "register_type",
    "remove",
    "save",
    "save_async",
    "strip_prefix",
    "verify",
]

__version__ = _core.__version__

_log.set_up()


#: Imported on first use: modules that few programs need or that import torch.
_LATER = {
    "copy": "_api.copy",
    "open_read": "_api.single_file",
    "open_write": "_api.single_file",
    "save_async": "_background.save_async",
    "Manager": "_manager.manager",
}
_MODULES = ("background", "dcp", "distributed", "integrations", "keep", "tools", "types", "when")


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - used here alone

    if module is None:
        return importlib.import_module(f".{name}", __name__)
    found = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return found


def __dir__() -> Sequence[str]:
    """The public names, for completion."""
    return sorted([*__all__, *_MODULES, "copy", "list", "open", "open_read", "open_write"])


def _warn_of_debug_build() -> None:
    import os  # noqa: PLC0415 - only developers come here
    import warnings  # noqa: PLC0415

    if not os.environ.get("FASTCKPT_ALLOW_DEBUG"):
        warnings.warn(
            "fastckpt's compiled core is a debug build, many times slower than a release: build it with "
            "'maturin develop --release', or set FASTCKPT_ALLOW_DEBUG=1 to silence this",
            RuntimeWarning,
            stacklevel=3,
        )


if _core.DEBUG_BUILD:
    _warn_of_debug_build()
del _warn_of_debug_build
