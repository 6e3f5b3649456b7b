"""The newest checkpoint of a run that can be loaded."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastckpt._api.checkpoint import Checkpoint
from fastckpt._api.load import load
from fastckpt._api.manage import leftovers
from fastckpt._api.manage import list as listed
from fastckpt._api.reports import LoadReport
from fastckpt._api.verify import verify
from fastckpt.exceptions import CorruptCheckpointError, NotACheckpointError

if TYPE_CHECKING:
    from .directory import Directory


#: What storage answers where a file is damaged, and an older checkpoint may not be.
_DAMAGE = {
    getattr(errno, name)
    for name in ("EIO", "ENODATA", "EUCLEAN", "EBADMSG", "ESTALE", "EILSEQ")
    if hasattr(errno, name)
}


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What :meth:`fastckpt.Manager.restore` found.

    Attributes:
        step: its training step.
        state: as :func:`fastckpt.load` returns it.
        metrics: the metrics that were saved with it.
        metadata: what else was given to ``save(metadata=...)``.
        path: its directory.
        skipped: newer checkpoints that could not be loaded: step and reason, the newest first.
        report: what the load did.
    """

    step: int
    state: Any
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    path: str
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport


def candidates(directory: Directory) -> list[int]:
    """The steps to try, the newest first.

    Also those whose directory a killed save took aside to replace it: a load puts it back.
    """
    steps = set(directory.look().steps)
    step_of = directory.names.step_of
    try:
        left = {step_of(one.checkpoint) for one in leftovers(directory.path)} - steps - {None}
        # A full list opens every manifest, so only where something lies under a temporary name and not under its own.
        aside = [one.name for one in listed(directory.path) if one.aside] if left else []
    except FileNotFoundError:
        aside = []
    steps.update(step for step in map(step_of, aside) if step is not None)
    return sorted(steps, reverse=True)


def restore(directory: Directory, step: int, skipped: tuple[tuple[int, str], ...], how: Mapping[str, Any]) -> Restored:
    """Load the checkpoint of a step; arguments for :func:`fastckpt.load` in ``how``."""
    path = directory.path_of(step)
    loaded = load(path, **{**how, "report": True})
    with Checkpoint(path) as checkpoint:
        about = checkpoint.metadata
    about = dict(about) if isinstance(about, Mapping) else {"metadata": about} if about is not None else {}
    metrics = about.pop("metrics", None)
    about.pop("step", None)
    metrics = dict(metrics) if isinstance(metrics, Mapping) else {}
    return Restored(step, loaded.state, metrics, about, path, skipped, loaded.report)


def verified(path: str) -> None:
    """Verify the checkpoint at ``path``.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    report = verify(path)
    if not report.ok:
        raise CorruptCheckpointError(f"restore: {path}: {report.damage[0]}")


def restore_newest(directory: Directory, steps: list[int], how: Mapping[str, Any], *, stacklevel: int) -> Restored:
    """Load the first of ``steps`` that can be loaded, and warn of each before it.

    Raises:
        CorruptCheckpointError: none can be.
    """
    skipped: tuple[tuple[int, str], ...] = ()
    for step in steps:
        try:
            if how.get("into") is not None and not how.get("strict", True):
                # What an older one lacks would keep what a damaged one has left in `into`.
                verified(directory.path_of(step))
            return restore(directory, step, skipped, how)
        except (CorruptCheckpointError, NotACheckpointError, OSError) as error:  # noqa: PERF203 - a loop of a few turns
            gone = isinstance(error, FileNotFoundError)
            if isinstance(error, OSError) and not gone and error.errno not in _DAMAGE:
                raise
            skipped = (*skipped, (step, str(error)))
            what = "is gone" if gone else "cannot be loaded"
            text = f"fastckpt: restore: {directory.path_of(step)} {what} and is skipped: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
    raise CorruptCheckpointError(
        f"restore: {directory.path}: none of {len(steps)} checkpoints can be loaded; the newest: {skipped[0][1]} "
        "(to start anew, move them away, or give the manager another directory)"
    )
