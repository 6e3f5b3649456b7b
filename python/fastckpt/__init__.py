"""Durable, atomic checkpoints of training state, in the open safetensors format.

fastckpt.save(state, "step-1000")        # durable and whole when it returns
state = fastckpt.load("step-1000")       # the same nested structure, tensors and all
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import _core, exceptions
from ._checkpoint import Checkpoint, Composed, TensorInfo, open
from ._doctor import Diagnosis, Finding, doctor
from ._load import load
from ._registry import register_type
from ._reports import Damage, LoadReport, SaveReport, VerifyReport
from ._save import save
from ._target import set_target
from ._verify import verify
from .exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    StructureMismatchError,
    UnsupportedTypeError,
)

if TYPE_CHECKING:
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
    "LoadReport",
    "Plan",
    "SaveReport",
    "StructureMismatchError",
    "TensorInfo",
    "UnsupportedTypeError",
    "VerifyReport",
    "__version__",
    "doctor",
    "exceptions",
    "load",
    "open",
    "plan",
    "register_type",
    "save",
    "set_target",
    "verify",
]

__version__ = _core.__version__

logging.getLogger("fastckpt").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    # Who saves does not plan: the arithmetic is imported when it is asked for.
    if name in ("plan", "Plan"):
        from ._plan import plan as module  # noqa: PLC0415

        globals().update(plan=module.plan, Plan=module.Plan)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
