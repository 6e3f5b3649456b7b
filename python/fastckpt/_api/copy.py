"""Copying a checkpoint to another directory or object store."""

from __future__ import annotations

from fastckpt._copy.copy import copy_checkpoint
from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.urls import place_of

from . import in_flight
from .io import IO, Engine, bytes_per_second, check_io, give_report
from .outcome import logger, until_settled
from .progress import ticker
from .reports import CopyReport


def copy(
    source: AnyPath,
    target: AnyPath,
    *,
    overwrite: bool = False,
    io: Engine | IO = "auto",
) -> CopyReport:
    """Copy a checkpoint to another directory or object store.

    Every shard is compared with its checksum on the way. The copy appears at ``target`` whole and durable, or not at
    all. If the copy is cut short, a later call with the same arguments continues it. Files beside
    the shards, such as a ``config.json``, are copied too, unless their names begin with a dot.

    Args:
        source: the checkpoint's directory, or its URL in an object store (docs/stores.md). The copy waits for an
            asynchronous save in flight to it.
        target: the path or the URL of the copy.
        overwrite: replace another checkpoint at ``target``.
        io: an :class:`IO` with ``bandwidth_limit``, the bytes per second that the copy may move, and ``progress``.

    Returns:
        The report. ``report.was_there`` is true if ``target`` already held this checkpoint and nothing was copied.

    Raises:
        CorruptCheckpointError: a file of the source is damaged or missing; nothing is at ``target``.
        FileNotFoundError: there is no checkpoint at ``source``.
        FileExistsError: ``target`` exists, and it is not a checkpoint or ``overwrite`` is false.
        NotACheckpointError: ``source`` was not written by fastckpt.
        ImportError: a place is a URL, and the package obstore cannot be imported.
        NotImplementedError: ``target`` is a path, and this installation has no compiled core.
        OSError: the storage failed, or the store did not answer or refused.
        ValueError: an argument is out of range, ``source`` and ``target`` are the same place, or the source holds a
            directory or a link.

    Example:
        >>> import fastckpt, numpy
        >>> _ = fastckpt.save({"w": numpy.ones(3)}, "runs/step-7")
        >>> fastckpt.copy("runs/step-7", "archive/step-7").was_there
        False
        >>> fastckpt.copy("runs/step-7", "archive/step-7").was_there
        True
    """
    begin, end = place_of("copy", source), place_of("copy", target)
    if begin == end:
        raise ValueError(f"copy: source and target are the same place, {begin!r}")
    how = check_io("copy", io)
    for place in (begin, end):
        if not is_url(place):
            in_flight.wait_for_paths(place)
    with ticker("copy", end, shown=how.progress) as tick:
        copied = until_settled(
            lambda: copy_checkpoint([begin], end, overwrite=bool(overwrite), limit=bytes_per_second(how), tick=tick)
        )
    report = CopyReport(source=begin, target=end, **copied._asdict())
    for warning in report.warnings:
        logger.warning("%s: %s", end, warning)
    logger.info("%s", report)
    give_report(how, report)
    return report
