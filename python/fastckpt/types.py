"""The records that fastckpt returns, for annotations and ``isinstance``."""

from __future__ import annotations

from fastckpt._api.checkpoint import Checkpoint, Composed, Origin, TensorHandle
from fastckpt._api.manage import Leftover, ListedCheckpoint
from fastckpt._api.reports import CopyReport, Damage, LoadReport, SaveReport, VerifyReport
from fastckpt._api.single_file import WritableFile
from fastckpt._api.tensor_info import TensorInfo
from fastckpt._background.pending import PendingSave, SaveProgress
from fastckpt._manager.checkpoints import ManagedCheckpoint
from fastckpt._manager.restore import Restored

__all__ = [
    "Checkpoint",
    "Composed",
    "CopyReport",
    "Damage",
    "Leftover",
    "ListedCheckpoint",
    "LoadReport",
    "ManagedCheckpoint",
    "Origin",
    "PendingSave",
    "Restored",
    "SaveProgress",
    "SaveReport",
    "TensorHandle",
    "TensorInfo",
    "VerifyReport",
    "WritableFile",
]


def __dir__() -> list[str]:
    return sorted(__all__)
