"""The target throughput of a process, for comparison in the live monitor."""

from __future__ import annotations

from fastckpt import _core


def set_target(target: str | float) -> tuple[int, int]:
    """Set the throughput that saves and loads of this process should reach; ``fastckpt-top`` compares them with it.

    ``FASTCKPT_TOP_TARGET`` in the environment does the same. ``--target`` of ``fastckpt bench`` and of ``fastckpt-top``
    accepts the same text.

    Args:
        target: ``"light"``, ``"medium"`` or ``"high"`` (the tiers of NVIDIA's sizing for DGX H100: 0.75, 1.5 and 3 GB/s
            written, 1, 2 and 4 GB/s read, each per GPU); a rate per GPU for both, bytes per second or a string with a
            unit (``"2.5GB/s"``); or ``"save=3GB/s,load=4GB/s"``, where a part may be left out to set no target for it.
            Case does not matter. GB is 10^9 bytes.

    Returns:
        Bytes per second per GPU of saves and of loads, 0 without a target.

    Raises:
        ValueError: ``target`` is none of these.

    Example:
        >>> import fastckpt
        >>> fastckpt.tools.set_target("save=2.5GB/s")
        (2500000000, 0)
    """
    try:
        return _core.set_target(str(target))
    except ValueError as error:
        raise ValueError(f"set_target: {error}") from None
