"""Verification of every byte against its checksum."""

from __future__ import annotations

import time

from fastckpt._foreign import written_beside
from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.reader import open_reader
from fastckpt._stores.urls import place_of

from .build_report import build_report, with_warnings
from .io import IO, Engine, check_io, give_report, most_staging
from .outcome import Attempt, conclude, until_settled
from .progress import ticker
from .reports import Damage, VerifyReport


def verify(path: AnyPath, *, io: Engine | IO = "auto") -> VerifyReport:
    """Compare every byte of a checkpoint with its checksum.

    Args:
        path: the checkpoint's directory, or its URL in an object store (docs/stores.md): every byte is fetched.
        io: how bytes are read, as for :func:`fastckpt.load`: an engine, or an :class:`IO` with threads and a progress
            bar.

    Returns:
        The report; ``report.ok`` is true for a whole checkpoint, ``report.damage`` lists every damaged range. Its
        ``warnings`` name files of other programs in the directory, such as those of torch.distributed.checkpoint.

    Raises:
        CorruptCheckpointError: the manifest itself is damaged, so that nothing is known about the rest.
        FormatVersionError: this release does not read the checkpoint's format version.
        FileNotFoundError: there is nothing at ``path``.
        ImportError: ``path`` is a URL, and the package obstore cannot be imported.
        OSError: the storage failed, or the store did not answer or refused.
        ValueError: an argument is out of range, or ``path`` is a URL of an unknown store.

    Example:
        >>> import fastckpt
        >>> _ = fastckpt.save({"step": 7}, "step-7")
        >>> fastckpt.verify("step-7").ok
        True
    """
    began = time.perf_counter()
    target = place_of("verify", path)
    how = check_io("verify", io)
    with Attempt("verify", target), ticker("verify", target, shown=how.progress) as tick:
        found = until_settled(
            lambda: open_reader("verify", target).verify(
                io=how.engine, threads=how.threads, most_staging=most_staging(how), tick=tick
            )
        )
    fields = tuple(Damage.__dataclass_fields__)
    beside = None if is_url(target) else written_beside(target)
    damage = tuple(Damage(**{name: getattr(item, name) for name in fields}) for item in found["damage"])
    told = with_warnings(found, [] if beside is None else [beside])
    report = conclude(build_report(VerifyReport, target, began, told, damage=damage))
    give_report(how, report)
    return report
