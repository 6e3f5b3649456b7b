"""The newest checkpoint of a run that can be loaded."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Mapping
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


#: How often the directory is looked at again because a checkpoint was removed while it was read.
_LOOKS = 20
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


def restore_newest(
    directory: Directory, find: Callable[[], list[int]], how: Mapping[str, Any], *, stacklevel: int
) -> Restored | None:
    """Load the newest checkpoint that can be loaded, and warn of each before it; None where there is none at all.

    Args:
        directory: the run.
        find: the steps to try, the newest first, as of now: another process may save and remove meanwhile.
        how: arguments for :func:`fastckpt.load`.
        stacklevel: as for ``warnings.warn``.

    Raises:
        CorruptCheckpointError: none can be.
    """
    skipped: dict[int, str] = {}
    steps, looks = find(), 1
    if not steps:
        return None
    while steps:
        step = steps.pop(0)
        path = directory.path_of(step)
        try:
            if how.get("into") is not None and not how.get("strict", True):
                # What an older one lacks would keep what a damaged one has left in `into`.
                verified(path)
            return restore(directory, step, tuple(skipped.items()), how)
        except (CorruptCheckpointError, NotACheckpointError, OSError) as error:
            if looks < _LOOKS and not os.path.lexists(path):
                # It was removed for one that became durable after the look.
                steps, looks = [one for one in find() if one not in skipped], looks + 1
                continue
            gone = isinstance(error, FileNotFoundError)
            if isinstance(error, OSError) and not gone and error.errno not in _DAMAGE:
                raise
            skipped[step] = str(error)
            what = "is gone" if gone else "cannot be loaded"
            text = f"fastckpt: restore: {path} {what} and is skipped: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
    newest = f"the newest: {next(iter(skipped.values()))}" if skipped else "all were removed meanwhile"
    raise CorruptCheckpointError(
        f"restore: {directory.path}: none of {len(skipped)} checkpoints can be loaded; {newest} "
        "(to start anew, move them away, or give the manager another directory)"
    )
