"""Saves and loads checkpoints of fastckpt, with the same files, through torch.distributed.checkpoint.

dcp.save(state, checkpoint_id="step-1000", storage_writer=fastckpt.dcp.Writer())
dcp.load(state, checkpoint_id="step-1000", storage_reader=fastckpt.dcp.Reader())
"""

from __future__ import annotations

from fastckpt._installed import Installation
from fastckpt.dcp._install import install
from fastckpt.dcp._reader import Reader
from fastckpt.dcp._stager import Stager
from fastckpt.dcp._writer import Writer

__all__ = ["Installation", "Reader", "Stager", "Writer", "install"]


def __dir__() -> list[str]:
    return sorted(__all__)
