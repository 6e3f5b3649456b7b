"""Durable, atomic checkpoints of training state, in the open safetensors format.

fastckpt.save(state, "step-1000")        # durable and whole when it returns
state = fastckpt.load("step-1000")       # the same nested structure, tensors and all
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import _core, exceptions
from ._checkpoint import Checkpoint, Composed, TensorInfo, open
from ._load import load
from ._outcome import LastWord
from ._registry import register_type
from ._reports import Damage, LoadReport, SaveReport, VerifyReport
from ._save import save
from ._target import set_target
from ._verify import verify
from .exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    ReplacedCheckpointError,
    StructureMismatchError,
    UnsupportedTypeError,
)

if TYPE_CHECKING:
    from ._arenas import release_buffers
    from ._async import save_async
    from ._doctor import Diagnosis, Finding, doctor
    from ._flight import drain
    from ._guard import Guard, guard
    from ._pending import PendingSave, SaveProgress
    from ._plan.plan import Plan, plan

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Composed",
    "CorruptCheckpointError",
    "Damage",
    "Diagnosis",
    "Finding",
    "FormatVersionError",
    "Guard",
    "LoadReport",
    "PendingSave",
    "Plan",
    "ReplacedCheckpointError",
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
    "load",
    "open",
    "plan",
    "register_type",
    "release_buffers",
    "save",
    "save_async",
    "set_target",
    "verify",
]

__version__ = _core.__version__

logging.getLogger("fastckpt").addHandler(LastWord())


#: What few programs need is imported when it is first asked for: asynchronous saves, planning, diagnosis.
_LATER = {
    "release_buffers": "_arenas",
    "PendingSave": "_pending",
    "SaveProgress": "_pending",
    "save_async": "_async",
    "drain": "_flight",
    "Guard": "_guard",
    "guard": "_guard",
    "Diagnosis": "_doctor",
    "Finding": "_doctor",
    "doctor": "_doctor",
    "Plan": "_plan.plan",
    "plan": "_plan.plan",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - used here alone

    found = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return found


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
