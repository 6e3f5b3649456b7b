"""A ``Manager`` in Ray Train, whose checkpoints are reported to Ray (docs/guides/ray.md)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fastckpt

__all__ = ["report"]

#: The checkpoints that are known to be reported to Ray; and when this process began.
_known: set[Path] = set()
_began = time.time()


def report(metrics: dict[str, Any], manager: Any) -> None:
    """Call ``ray.train.report``, with the newest durable checkpoint of a manager if it has not been reported yet.

    It copies nothing and waits for no save. All workers call it, like ``ray.train.report``. A checkpoint counts only if
    this run restored it, or saved it since its start: others may be damaged, or left behind.

    Args:
        metrics: as for ``ray.train.report``.
        manager: a :class:`fastckpt.Manager` in the directory of the run, without ``keep``: Ray removes checkpoints.

    Raises:
        ValueError: the manager has policies to ``keep``, or its directory is outside the run's.

    Example:
        >>> from fastckpt.integrations.ray import report  # report({"loss": loss}, manager)
    """
    from ray import train  # noqa: PLC0415 - the program has it

    if manager.policies:
        raise ValueError("report: Ray ends a run whose checkpoints are gone: leave out keep=, and give Ray num_to_keep")
    context, checkpoint = train.get_context(), None
    if context.get_world_rank() == 0 and (step := manager.latest()) is not None:
        path, storage = Path(manager.path(step)).resolve(), context.get_storage()
        if not _known:
            mode = train.CheckpointConsistencyMode.COMMITTED
            known = train.get_all_reported_checkpoints(consistency_mode=mode)
            _known.update(Path(one.checkpoint.path).resolve() for one in known)
        # Ray would remove a checkpoint that is reported twice when the older report expires.
        if path not in _known and (step == manager.remaining(step).start - 1 or _is_new(path)):
            # Ray compares paths as text, so symbolic links in the run's own path must stay.
            inside = path.relative_to(Path(storage.experiment_fs_path).resolve())
            checkpoint = train.Checkpoint(f"{storage.experiment_fs_path}/{inside}", storage.storage_filesystem)
            _known.add(path)
    train.report(metrics, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)


def _is_new(path: Path) -> bool:
    """Whether a checkpoint was saved since this process began."""
    with fastckpt.open(path) as checkpoint:
        return checkpoint.origin.created >= _began
