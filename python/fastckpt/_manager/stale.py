"""Whether training has progressed between two checkpoints, by the checksums in their manifests.

A loop whose optimizer updates nothing, or that saves a copy that is never updated, writes valid checkpoints of one
state for days. The check reads no data: manifests have a checksum for each tensor, wherever it is stored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from fastckpt._stores.reader import open_reader
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from .directory import Directory
    from .tier import Tier

logger = logging.getLogger("fastckpt")

#: For each trained group of a checkpoint, the bytes and the checksum of each tensor by its name.
Sums: TypeAlias = Mapping[str, Mapping[str, tuple[int, int]]]
#: Trained tensors are floating-point and have at least one dimension: an optimizer counts steps in scalars.
_FLOATS = ("F", "BF", "C")
#: Buffers that a forward pass changes, even without training.
_is_statistic = re.compile(r"(?:^|\.)running_(?:mean|var)$").search
#: The container's name, or the name that torch's optimizers give to a moment.
_is_moment = re.compile(
    r"(?:^|\.)(?:(?:opt(?:im[^.]*|s)?|adam[^.]*|sgd|muon|lion)\.|(?:exp_avg(?:_sq)?|momentum_buffer)(?:\.|$))",
    re.IGNORECASE,
).search
#: Adapters: trained weights that may be saved beside a model that does not change.
_is_adapter = re.compile(r"(?:^|[._])(?:lora|adapter)", re.IGNORECASE).search
#: The most names in a message.
_SHOWN = 3


def sums_of(path: str, operation: str = "save", frozen: Sequence[str] | str = ()) -> Sums:
    """The checksums of the weights and of the optimizer's moments in a checkpoint.

    Args:
        path: its path.
        operation: the operation that reads it, for errors.
        frozen: patterns of tensors that are not trained.

    Raises:
        CheckpointError: the checkpoint is damaged, or the path is not a checkpoint.
        OSError: the directory cannot be read.
    """
    # The command line imports this file before it knows whether the package is complete.
    from fastckpt._api.selection import patterns_of  # noqa: PLC0415

    reader = open_reader(operation, path)
    shards = [shard.file for shard in reader.shards()]
    found: dict[str, dict[str, tuple[int, int]]] = {"model": {}, "optimizer": {}}
    # Names alone are not enough: a layer of the model may have the name of an optimizer.
    is_apart = any(name.startswith("training/") for name in shards)
    still = patterns_of("frozen", frozen, operation)
    for index, tensor in enumerate(reader.tensors()):
        if not tensor.shape or not tensor.nbytes or not tensor.dtype.startswith(_FLOATS):
            continue
        is_training = shards[tensor.shard].startswith("training/")
        is_moment = is_training == is_apart and _is_moment(tensor.name) is not None
        is_weight = not _is_statistic(tensor.name) and (not is_training or _is_adapter(tensor.name) is not None)
        crc = reader.checksum(index)
        if crc is not None and (is_moment or is_weight) and still.first(tensor.name) is None:
            found["optimizer" if is_moment else "model"][tensor.name] = tensor.nbytes, crc
    return found


def changed(before: Sums, now: Sums) -> dict[str, float]:
    """For each group, the share of the bytes in tensors that changed, among tensors that both have."""
    shares = {}
    for group, tensors in now.items():
        old = before[group]
        both = [(size, old[name] != (size, crc)) for name, (size, crc) in tensors.items() if name in old]
        if both:
            shares[group] = sum(size for size, differs in both if differs) / sum(size for size, _ in both)
    return shares


def _alarm(path: str, since: int, now: Sums, shares: Mapping[str, float]) -> str | None:
    """A message if a whole group has not changed since a step."""
    still = [group for group, share in shares.items() if share == 0]
    if not still:
        return None
    names = [name for group in still for name in now[group]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{path}: no tensor of the {' and of the '.join(still)} has changed since step {since}: "
        f"{', '.join(names[:_SHOWN])}{more}: does the optimizer step, and is this the state that it trains? "
        '(if this is intended, pass stale="ignore")'
    )


class StaleAlarm:
    """Compares each checkpoint of a run with the one before it; ``stale`` and ``frozen`` are the manager's.

    Attributes:
        raises: whether an anomaly is an error.
        changed: the last step that was compared with the previous one, and the share of each group that changed.
        warning: the anomaly of that step, as text for the report.
    """

    def __init__(self, local: Tier[Directory], stale: str, frozen: Sequence[str] | str) -> None:
        if stale not in {"warn", "raise", "ignore"}:
            raise ValueError(f'Manager: stale must be "warn", "raise" or "ignore", not {stale!r}')
        self._local = local
        self._frozen = frozen
        self.raises, self._ignores = stale == "raise", stale == "ignore"
        self.changed: tuple[int | None, dict[str, float]] = None, {}
        self.warning: str | None = None
        #: The error to be raised.
        self._error: str | None = None
        #: The last step that was saved or restored, and its path or its checksums.
        self._before: tuple[int, str | Sums] | None = None

    def resume(self, step: int, path: str) -> None:
        """Record that training continues from the checkpoint of a step at ``path``."""
        self._before = step, path

    def compare(self, step: int) -> None:
        """Compare the checkpoint of a step with the one before it."""
        path, catalogue = self._local.place.path_of(step), self._local.catalogue
        try:
            now, before = sums_of(path, frozen=self._frozen), self._before
            # If two saves end at nearly the same time, the earlier one may get here last.
            if before is None or step > before[0]:
                self._before = step, now
            if before is None or step <= before[0]:
                return
            since, sums = before
            shares = changed(sums_of(sums, frozen=self._frozen) if isinstance(sums, str) else sums, now)
        except (CheckpointError, OSError) as error:
            logger.debug("%s: not compared with the one before: %s", path, error)
            return
        self.changed = step, shares
        from fastckpt import _core  # noqa: PLC0415 - the command line imports this file, likewise

        _core.set_changed(step, shares.get("model"), shares.get("optimizer"))
        for entry in catalogue.entries([step]).values():
            catalogue.add(entry._replace(saved=replace(entry.saved, changed=shares)))
        self.warning = None if self._ignores else _alarm(path, since, now, shares)
        if self.warning is not None:
            self._error = self.warning
            logger.warning("%s", self.warning)

    def raise_once(self) -> None:
        """Raise the pending error, once.

        Raises:
            CheckpointError: a trained group has not changed.
        """
        text, self._error = self._error, None
        if text is not None and self.raises:
            raise CheckpointError(text)
