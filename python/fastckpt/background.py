"""What saves in the background need of a program: an end, memory that is given back, a guard of lazy copies."""

from __future__ import annotations

from fastckpt._api.host_memory import release_buffers
from fastckpt._api.in_flight import drain
from fastckpt._background.guard import Guard, guard

__all__ = ["Guard", "drain", "guard", "release_buffers"]
