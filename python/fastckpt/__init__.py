"""Durable, atomic checkpoints of training state, in the open safetensors format.

fastckpt.save(state, "step-1000")        # durable and whole when it returns
state = fastckpt.load("step-1000")       # the same nested structure, tensors and all
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastckpt import _core, exceptions
from fastckpt._api.checkpoint import Checkpoint, Composed, Origin
from fastckpt._api.checkpoint import open as open
from fastckpt._api.load import load
from fastckpt._api.manage import Leftover, ListedCheckpoint, leftovers, remove, remove_leftover
from fastckpt._api.manage import list as list
from fastckpt._api.outcome import LastWord
from fastckpt._api.register import Registry, register_type
from fastckpt._api.reports import CopyReport, Damage, Loaded, LoadReport, SaveReport, VerifyReport
from fastckpt._api.save import save
from fastckpt._api.target import set_target
from fastckpt._api.tensor_info import TensorInfo
from fastckpt._api.verify import verify
from fastckpt.exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    RankFailure,
    RanksError,
    ReplacedCheckpointError,
    StructureMismatchError,
    UnsupportedTypeError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._api.copy import copy as copy
    from fastckpt._api.host_memory import release_buffers
    from fastckpt._api.in_flight import drain
    from fastckpt._api.probe import probe
    from fastckpt._background.guard import Guard, guard
    from fastckpt._background.pending import PendingSave, SaveProgress
    from fastckpt._background.save_async import save_async
    from fastckpt._core import Probe
    from fastckpt._manager.manager import Manager
    from fastckpt._manager.restore import Restored
    from fastckpt._tools.doctor import Diagnosis, Finding, doctor
    from fastckpt._tools.plan.plan import plan
    from fastckpt._tools.plan.record import Plan

#: Without ``copy``, ``list`` and ``open``: ``from fastckpt import *`` must not hide Python's own.
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Composed",
    "CopyReport",
    "CorruptCheckpointError",
    "Damage",
    "Diagnosis",
    "Finding",
    "FormatVersionError",
    "Guard",
    "Leftover",
    "ListedCheckpoint",
    "LoadReport",
    "Loaded",
    "Manager",
    "NotACheckpointError",
    "Origin",
    "PendingSave",
    "Plan",
    "Probe",
    "RankFailure",
    "RanksError",
    "Registry",
    "ReplacedCheckpointError",
    "Restored",
    "SaveProgress",
    "SaveReport",
    "StructureMismatchError",
    "TensorInfo",
    "UnsupportedTypeError",
    "VerifyReport",
    "__version__",
    "doctor",
    "drain",
    "exceptions",
    "guard",
    "leftovers",
    "load",
    "plan",
    "probe",
    "register_type",
    "release_buffers",
    "remove",
    "remove_leftover",
    "save",
    "save_async",
    "set_target",
    "verify",
]

__version__ = _core.__version__

logging.getLogger("fastckpt").addHandler(LastWord())


#: Rarely used modules are imported on first use: asynchronous saves, planning, diagnosis.
_LATER = {
    "copy": "_api.copy",
    "release_buffers": "_api.host_memory",
    "PendingSave": "_background.pending",
    "SaveProgress": "_background.pending",
    "save_async": "_background.save_async",
    "drain": "_api.in_flight",
    "Probe": "_core",
    "probe": "_api.probe",
    "Guard": "_background.guard",
    "guard": "_background.guard",
    "Manager": "_manager.manager",
    "Restored": "_manager.restore",
    "Diagnosis": "_tools.doctor",
    "Finding": "_tools.doctor",
    "doctor": "_tools.doctor",
    "Plan": "_tools.plan.record",
    "plan": "_tools.plan.plan",
}


#: Modules imported on first use; the first two import torch.
_MODULES = ("dcp", "distributed", "keep", "save_when")


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
    """Also the names that are imported later: for completion."""
    return sorted({*globals(), *_LATER, *_MODULES})


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
