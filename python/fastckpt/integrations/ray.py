"""A ``Manager`` in Ray Train: Ray knows its checkpoints, and one is saved before a node goes (docs/guides/ray.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["preempted", "report"]

#: What Ray has said in this process.
_heard: list[Any] = []


def report(metrics: dict[str, Any], manager: Any) -> None:
    """``ray.train.report``, with the newest durable checkpoint of a manager if Ray does not know it yet.

    Nothing is copied, and no save is waited for. All workers call it, as they do ``ray.train.report``.

    Args:
        metrics: as for ``ray.train.report``.
        manager: a :class:`fastckpt.Manager` in the directory of the run, without ``keep``: Ray removes checkpoints.

    Raises:
        ValueError: the manager has policies to ``keep``, or its directory is outside of the run's.

    Example:
        >>> from fastckpt.integrations.ray import report  # report({"loss": loss}, manager)
    """
    from ray import train  # noqa: PLC0415 - the program has it

    if manager.policies:
        raise ValueError("report: Ray ends a run whose checkpoints are gone: leave out keep=, and give Ray num_to_keep")
    step = manager.latest() if train.get_context().get_world_rank() == 0 else None
    path, known = step and Path(manager.path(step)).resolve(), train.get_checkpoint()
    # Twice, and Ray would remove it for the first of them.
    is_new = path and not (known and Path(known.path).resolve() == path)
    checkpoint = train.Checkpoint(path) if is_new else None
    train.report(metrics, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)


def preempted() -> bool:
    """Whether Ray says, for the first time, that nodes of this run are about to go; all workers call it.

    Returns:
        The same on all workers: ``manager.save(step, state, force=preempted())``.

    Example:
        >>> from fastckpt.integrations.ray import preempted  # in each step
    """
    from ray import train  # noqa: PLC0415 - the program has it

    news = train.get_preemption_info()
    is_new = news is not None and news not in _heard
    if is_new:
        _heard.append(news)
    return is_new
