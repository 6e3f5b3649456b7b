"""A network fault below the API: one bit flips in what a rank receives."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastckpt._ranks import messages, requests, store, torch_distributed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def message(number: int, place: float, found: list[int]) -> Iterator[None]:
    """Flip a bit in message ``number`` of those that this rank receives, at the relative ``place`` (0 to 1).

    The number of the sending rank is added to ``found``.
    """
    real, count = torch_distributed.DataGroup.receive, iter(range(1 << 30))

    class Altered:
        def __init__(self, transfer: Any, address: int, nbytes: int, peer: int) -> None:
            self.transfer, self.at, self.peer = transfer, address + min(int(place * nbytes), nbytes - 1), peer

        def wait(self, seconds: float) -> None:
            self.transfer.wait(seconds)
            ctypes.c_uint8.from_address(self.at).value ^= 16
            found.append(self.peer)

    def receive(self: Any, peer: int, address: int, nbytes: int, owner: object) -> Any:
        transfer = real(self, peer, address, nbytes, owner)
        return Altered(transfer, address, nbytes, peer) if next(count) == number else transfer

    torch_distributed.DataGroup.receive = receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch_distributed.DataGroup.receive = real  # type: ignore[method-assign]


@contextmanager
def word(kind: str, number: int, place: float, found: list[str]) -> Iterator[None]:
    """Alter a value that this rank gets from the store: value ``number`` of those whose keys contain
    ``kind`` as a part (``up``, ``verdict``). The key is added to ``found``."""
    real, count = store.Transport.serve, iter(range(1 << 30))

    def altered(key: str, value: bytes | None) -> bytes | None:
        if not value or value[:1] != b"=" or kind not in key.split("/") or next(count) != number:
            return value
        found.append(key)
        raw = bytearray(value)
        raw[1 + min(int(place * (len(raw) - 1)), len(raw) - 2)] ^= 4
        return bytes(raw)

    def serve(self: Any, request: requests.Request, limit: float) -> Any:
        reply = real(self, request, limit)
        if isinstance(request, requests.Get):
            return [altered(key, value) for key, value in zip(request.keys, reply, strict=True)]
        return reply

    store.Transport.serve = serve  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.Transport.serve = real  # type: ignore[method-assign]


def version(text: str) -> None:
    """Make this rank report another version of fastckpt."""
    messages.VERSION = text
