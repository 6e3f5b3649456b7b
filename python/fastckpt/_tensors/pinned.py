"""Host memory that is pinned, or being pinned: registered with CUDA, so that devices copy from and to it directly.

Registration is slow: each page is allocated and locked. So it happens in the background, in pieces, and a copy waits
only for the pieces that it touches. CUDA refuses a copy whose host memory is partly registered, and does not guarantee
one that spans two registrations, so :func:`split` cuts at the borders of pieces.

CUDA's runtime keeps the last error of each thread until it is read, and the check after the caller's next kernel would
read it: training would fail because of our refused call. So each call is made in a short-lived thread, and its error
ends with the thread.

A registered range must not be unmapped. :meth:`Registration.close` comes first in every case: even if a signal handler
raises meanwhile, the process has no more threads, or the interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import threading
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from fastckpt._units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

#: Bytes that are registered at a time.
PIECE = 256 << 20
#: The flag that registers memory for the contexts of all devices of the process.
_PORTABLE = 1

logger = logging.getLogger("fastckpt")


class _Piece:
    """A part of host memory that is registered as a whole or not at all."""

    __slots__ = ("begin", "end", "is_pinned", "settled")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.is_pinned = False
        #: Set when it is known whether the piece is pinned.
        self.settled = threading.Event()

    @property
    def nbytes(self) -> int:
        """The size of the piece."""
        return self.end - self.begin


class _Known:
    """All pieces of the process. Their lists are replaced, never changed: readers need no lock."""

    def __init__(self) -> None:
        # Signal handlers save, too: one may interrupt its own thread in this code.
        self.lock = threading.RLock()
        self.live: list[Registration] = []
        #: The start addresses of all pieces in order, and the pieces.
        self.pieces: tuple[list[int], list[_Piece]] = [], []
        #: The borders of pieces, in order.
        self.borders: list[int] = []
        #: Pinned bytes.
        self.nbytes = 0

    def add(self, registration: Registration) -> None:
        """Add a registration."""
        with self.lock:
            self.live.append(registration)
            self._index()

    def remove(self, registration: Registration) -> None:
        """Remove a registration."""
        with self.lock:
            if registration in self.live:
                self.live.remove(registration)
            self._index()

    def _index(self) -> None:
        known: tuple[Registration, ...] | None = None
        # The loop repeats if a signal handler has run meanwhile, which the lock does not stop.
        while known != tuple(self.live):
            known = tuple(self.live)
            pieces = sorted((piece for live in known for piece in live.pieces), key=lambda piece: piece.begin)
            self.pieces = [piece.begin for piece in pieces], pieces
            self.borders = sorted({border for piece in pieces for border in (piece.begin, piece.end)})

    def reserve(self, nbytes: int, limit: int | None) -> bool:
        """Count bytes that are about to be pinned; False if the total would exceed ``limit``."""
        with self.lock:
            if limit is not None and self.nbytes + nbytes > limit:
                return False
            self.nbytes += nbytes
            return True

    def unreserve(self, nbytes: int) -> None:
        """Subtract these bytes."""
        with self.lock:
            self.nbytes -= nbytes


_known = _Known()


def wait(address: int, nbytes: int) -> None:
    """Wait until it is known for all of a range whether it is pinned. The GIL is released meanwhile."""
    begins, pieces = _known.pieces
    at = max(0, bisect_right(begins, address) - 1)
    while at < len(pieces) and pieces[at].begin < address + nbytes:
        if address < pieces[at].end:
            pieces[at].settled.wait()
        at += 1


def split(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """A range cut at the borders of pieces, as address and size of each part, in order."""
    borders, end = _known.borders, address + nbytes
    for at in range(bisect_right(borders, address), bisect_left(borders, end)):
        yield address, borders[at] - address
        address = borders[at]
    yield address, end - address


class Registration:
    """A range of host memory that is pinned piece by piece in the background. Made by :func:`register`.

    Attributes:
        nbytes: the size of the range.
        pinned: bytes of it that are pinned so far.
    """

    def __init__(
        self, torch: ModuleType, device: Any, address: int, nbytes: int, limit: int | None, piece: int
    ) -> None:
        self.nbytes = nbytes
        #: The owner of the memory, if it must stay mapped until :meth:`close`, even if others release it.
        self.owner: object = None
        self.pinned = 0
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._limit = limit
        self._reason: str | None = None
        # Whole pages are registered, and no page twice.
        most = nbytes if limit is None else min(nbytes, limit // mmap.PAGESIZE * mmap.PAGESIZE)
        if limit and most < nbytes:
            self._reason = _CAPPED
        self.pieces = [
            _Piece(begin, min(address + most, begin + piece)) for begin in range(address, address + most, piece)
        ]
        self._is_closed = False
        #: Held while a piece is registered, and while all are unregistered.
        self._busy = threading.Lock()

    @property
    def problem(self) -> str | None:
        """Why not all of the memory is pinned, and what to do; None during pinning, and when all is pinned."""
        if self._reason is None or not self.is_done():
            return None
        return (
            f"{show_bytes(self.pinned)} of {show_bytes(self.nbytes)} of host memory are pinned, because "
            f"{self._reason}; copies that use the rest are correct, but slower"
        )

    def is_done(self) -> bool:
        """Whether it is known for all of the range whether it is pinned."""
        return not self.pieces or self.pieces[-1].settled.is_set()

    def wait(self) -> None:
        """Wait until it is known for all of the range whether it is pinned."""
        for piece in self.pieces:
            piece.settled.wait()

    def start(self) -> None:
        """Register in a separate thread, not a daemon: CUDA exists as long as it runs."""
        if not self.pieces:
            return
        try:
            threading.Thread(target=self._register, name="fastckpt-pin").start()
        except RuntimeError as error:
            self._refuse(f"no thread could be started for pinning ({error})")

    def _register(self) -> None:
        reason: str | None = "pinning was abandoned"
        try:
            with self._module.device(self._device):
                for piece in self.pieces:
                    # The lock is released between pieces: a close waits for one piece at most.
                    with self._busy:
                        reason = self._pin(piece)
                    if reason is not None:
                        break
                    piece.settled.set()
        except Exception as error:  # noqa: BLE001 - the report has it, and copies need no pinning
            reason = str(error)
        finally:
            if reason is not None:
                self._refuse(reason)

    def _pin(self, piece: _Piece) -> str | None:
        """Register one piece; returns the reason if that failed, or None."""
        if self._is_closed:
            return "its memory is no longer needed"
        if not threading.main_thread().is_alive():
            return "the program ends"
        cudart = self._module.cudart()
        pin = getattr(cudart, "cudaHostRegister", None)
        if pin is None or not hasattr(cudart, "cudaHostUnregister"):
            return f"torch cannot pin memory for a device of type {self._device.type}"
        if not _known.reserve(piece.nbytes, self._limit):
            return _CAPPED
        try:
            status = pin(piece.begin, piece.nbytes, _PORTABLE)
            piece.is_pinned = not int(status)
        finally:
            if not piece.is_pinned:
                _known.unreserve(piece.nbytes)
        if not piece.is_pinned:
            return (
                f"CUDA refused ({_text(cudart, status)}; a smaller IO(pin=) needs less memory that cannot be swapped)"
            )
        self.pinned += piece.nbytes
        return None

    def _refuse(self, reason: str) -> None:
        """Record that the rest is not pinned."""
        self._reason = reason
        for piece in self.pieces:
            piece.settled.set()

    def close(self) -> None:
        """Unregister the registered pieces, after the one in progress; then the memory may be unmapped.

        No copy may be in progress. An error of a signal handler is raised at the end.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            _apart(self._unregister)
        finally:
            _known.remove(self)

    def _unregister(self) -> None:
        with self._busy:
            for piece in self.pieces:
                if not piece.is_pinned:
                    continue
                try:
                    with self._module.device(self._device):
                        cudart = self._module.cudart()
                        status = cudart.cudaHostUnregister(piece.begin)
                    reason = _text(cudart, status) if int(status) else None
                except Exception as error:  # noqa: BLE001 - it is logged
                    reason = str(error)
                piece.is_pinned = False
                _known.unreserve(piece.nbytes)
                self.pinned -= piece.nbytes
                if reason is not None:
                    logger.warning("cannot unpin %d bytes of host memory: %s", piece.nbytes, reason)

    def forget(self) -> None:
        """Forget all pieces in a forked child, which has neither the memory nor the thread nor CUDA."""
        self._is_closed = True
        self.pinned = 0
        self.pieces = []


_CAPPED = "IO(pin=) allows no more"


def register(
    torch: ModuleType, device: Any, address: int, nbytes: int, limit: int | None = None, piece: int = PIECE
) -> Registration | None:
    """Pin host memory for copies from and to all devices of a kind, in the background.

    Args:
        torch: the module.
        device: a ``torch.device``, any of that kind.
        address: the start of the memory, at a page.
        nbytes: the size of the memory.
        limit: the most bytes that this process pins, over all registrations; None for no limit. With 0 nothing is
            pinned, without a ``problem``.
        piece: bytes to register at a time, whole pages.

    Returns:
        The registration; None for devices that do not pin memory.
    """
    if not hasattr(torch.get_device_module(device), "cudart"):
        return None
    registration = Registration(torch, device, address, nbytes, limit, piece)
    try:
        _known.add(registration)
        registration.start()
    except BaseException:  # a signal handler may have raised it; the thread may run
        registration.close()
        raise
    return registration


def _text(cudart: Any, status: Any) -> str:
    """CUDA's name for an error."""
    text = f"error {int(status)}"
    with contextlib.suppress(Exception):
        text = f"{text}: {cudart.cudaGetErrorString(status)}"
    return text


def _apart(work: Callable[[], None]) -> None:
    """Run ``work`` in a separate thread, and wait for it; raise errors of signal handlers afterwards.

    If no thread can be started, or it is unknown whether one was, the first of the two to arrive does the work.
    """
    claim = threading.Lock()
    done = threading.Event()
    interrupt: BaseException | None = None

    def run() -> None:
        nonlocal interrupt
        if not claim.acquire(blocking=False):
            return
        again = True
        while again:
            again = False
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
                again = not isinstance(error, Exception)  # raised by a signal handler: the rest must still be done
        done.set()

    try:
        threading.Thread(target=run, name="fastckpt-unpin").start()
    except RuntimeError:  # no further thread is allowed, or the interpreter is ending
        run()
    except BaseException as error:  # noqa: BLE001 - raised below
        interrupt = error
        run()
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: BLE001, PERF203 - raised below
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _forget() -> None:
    global _known  # noqa: PLW0603 - of this process alone
    for registration in _known.live:
        registration.forget()
    _known = _Known()


@atexit.register
def _end() -> None:
    # Memory that is still mapped is released with the interpreter, later than this.
    for registration in tuple(_known.live):
        registration.close()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
