"""The encoding of values and failures in the store, and the texts of errors.

Every value is followed by its checksum, which its reader compares: values decide what is sealed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastckpt import _crc64
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt.exceptions import RankFailure

#: The only key of a dict that represents bytes.
_BYTES = "\0bytes"
#: The most failures in an error; a full disk fails every rank.
LISTED = 16
#: Messages of failures are cut to this length: an exception may print a whole state.
LONGEST = 2000
#: The outcomes of a failed operation: the old checkpoint; one of the two; the new one.
NOTHING, UNKNOWN, COMMITTED = "nothing", "unknown", "committed"
#: Bytes of a checksum.
SUM = 8


class DamagedError(CheckpointError):
    """A message of another rank arrived altered."""


def sealed(data: bytes) -> bytes:
    """Return bytes followed by their checksum."""
    return data + _crc64.of(data).to_bytes(SUM, "little")


def opened(data: bytes, what: str) -> bytes:
    """Return the bytes that ``sealed`` was given.

    Raises:
        DamagedError: the bytes were altered on the way; the message names ``what``.
    """
    content, sum_ = data[:-SUM], data[-SUM:]
    if _crc64.of(content).to_bytes(SUM, "little") != sum_:
        raise DamagedError(f"{what} was altered on its way: look at the network and the memory of both hosts")
    return content


def encode(value: Any) -> bytes:
    """Return a value of None, bool, int, float, str, bytes, lists, tuples (as lists) and dicts as bytes.

    Raises:
        TypeError: a value has the wrong type, or a dict has a key that is not a string.
    """
    blobs: list[bytes] = []

    def plain(one: Any) -> Any:
        if isinstance(one, (bytes, bytearray, memoryview)):
            blobs.append(bytes(one))
            return {_BYTES: len(blobs[-1])}
        if isinstance(one, dict):
            for key in one:
                if not isinstance(key, str) or key == _BYTES:
                    raise TypeError(f"a dict for other ranks has the key {key!r}, which is reserved or not a string")
            return {key: plain(item) for key, item in one.items()}
        if isinstance(one, (list, tuple)):
            return [plain(item) for item in one]
        return one

    text = json.dumps(plain(value), separators=(",", ":")).encode()
    return sealed(b"%d\n%s%s" % (len(text), text, b"".join(blobs)))


def decode(data: bytes, what: str = "the message of a rank") -> Any:
    """Return the value that ``encode`` was given, its tuples as lists.

    Raises:
        DamagedError: the value was altered on the way; the message names ``what``.
    """
    length, _, rest = opened(data, what).partition(b"\n")
    at = int(length)

    def back(one: Any) -> Any:
        nonlocal at
        if isinstance(one, dict):
            if _BYTES in one:
                at += one[_BYTES]
                return rest[at - one[_BYTES] : at]
            return {key: back(item) for key, item in one.items()}
        if isinstance(one, list):
            return [back(item) for item in one]
        return one

    return back(json.loads(rest[:at]))


def told(error: BaseException) -> str:
    """Return the description of an exception for other ranks."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - the user's exception must reach the others even without its text
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"failed: {text[:LONGEST]}"


def one_a_rank(failures: list[RankFailure]) -> list[RankFailure]:
    """Return the first failure of each rank, in the order of ranks."""
    by_rank: dict[int, RankFailure] = {}
    for failure in failures:
        by_rank.setdefault(failure.rank, failure)
    return [by_rank[rank] for rank in sorted(by_rank)]


def ending(kind: str, outcome: str, *, agreeing: bool, here: bool) -> str:
    """Return the consequence of a failure for the checkpoint.

    Args:
        kind: the operation.
        outcome: the outcome in the verdict.
        agreeing: whether it failed in a round before the last.
        here: whether this rank has committed it, whatever the verdict is.
    """
    if kind not in {"save", "load"}:
        return "the ranks have not agreed"
    if kind == "load":
        return "nothing was loaded" if agreeing else "the destination may be partly filled"
    if outcome == COMMITTED:
        return "it was committed anyway: the complete new checkpoint is at the path"
    if here:
        return "this rank has committed it after the others had given up: the new checkpoint is at the path"
    if outcome == UNKNOWN:
        return "the outcome is unknown: look at the path, which has either the old or the new checkpoint, complete"
    return "nothing was committed; the old checkpoint is unchanged"


def failed(
    failures: list[RankFailure], more: int, outcome: str, calls: Sequence[tuple[Sequence[Any], bool]] | None
) -> bytes:
    """Return the verdict that names the failures.

    Args:
        failures: the failures of ranks.
        more: the number of further failures.
        outcome: the outcome for the checkpoint, such as ``NOTHING``.
        calls: the calls that were in the turn, and which of them wait for the next; None if too many to distinguish.
    """
    return b"!" + encode([[list(one) for one in failures], more, outcome, calls])
