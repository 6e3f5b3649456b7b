"""The throughput that a process wants, for the live monitor to compare with."""

from __future__ import annotations

from fastckpt import _core


def set_target(target: str | float) -> None:
    """Say what throughput the saves and loads of this process should reach; ``fastckpt-top`` shows them against it.

    ``FASTCKPT_TOP_TARGET`` in the environment does the same.

    Args:
        target: ``"light"``, ``"medium"`` or ``"high"`` (the tiers of NVIDIA's sizing for DGX H100: 0.75, 1.5 and 3 GB/s
            written, 1, 2 and 4 GB/s read, each per GPU), a number of GB/s per GPU for both, or ``"save=3,load=4"``.
            GB is 10^9 bytes.

    Raises:
        ValueError: ``target`` is none of these.
    """
    _core.set_target(str(target))
