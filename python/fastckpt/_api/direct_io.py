"""``io="gds"``: what of an operation goes between devices and files directly, and why the rest does not."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fastckpt._tensors.gds import Direct, Stretch
    from fastckpt._tensors.memory import Mover


class Way:
    """How an operation was asked to move bytes.

    Args:
        io: what the caller asked for.
        direct: what moves bytes directly, or None.
        reason: why it is None, or why some tensors cannot take part; None where nothing has to be said.

    Attributes:
        engine: the engine that the core is asked for.
        direct: what the core takes as ``direct=``.
    """

    def __init__(self, io: str, direct: Direct | None = None, reason: str | None = None) -> None:
        self._is_asked = io == "gds"
        self._reason = reason
        self.engine = "auto" if self._is_asked else io
        self.direct: tuple[frozenset[int], Callable[[Sequence[Stretch], int], list[int]]] | None = None
        if direct is not None and direct.indices:
            self.direct = direct.indices, direct.move

    def noted(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """The core's report, with the reason why not all, or nothing, went directly."""
        before = report["fallback"]
        reason = self._reason
        if self.direct is not None and reason is None and not report["blocks"]["gds"] and before is None:
            reason = "no block of the checkpoint lies inside one tensor on a device"
        if not self._is_asked or reason is None:
            return report
        return {**report, "fallback": f"gds: {reason}" if before is None else f"{before}; gds: {reason}"}


@contextmanager
def way_of(operation: str, io: str, movers: Mapping[int, Mover], *, write: bool) -> Iterator[Way]:
    """How a save, or a load, by one process in the caller's thread, moves bytes.

    Args:
        operation: the name of the operation, for errors.
        io: what the caller asked for.
        movers: by number of tensor or request.
        write: whether it is a save.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """
    if io != "gds":
        yield Way(io)
        return
    from fastckpt._tensors.gds import Direct  # noqa: PLC0415 - few programs need it

    direct = Direct(operation, movers, write=write)
    try:
        yield Way(io, direct, direct.reason)
    finally:
        direct.close()
