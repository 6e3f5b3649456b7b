"""What each checkpoint of a run says of itself: when it was saved, and with which metrics.

The metrics lie in the checkpoint's own metadata. Reading them opens its manifest, so what was read is kept in a file,
``.fastckpt-run.json``, beside the policies in force. An entry of it counts only while the checkpoint is the same one,
by what :meth:`.directory.Directory.identity` says. Without the file, or with a damaged one, all is read again from the
checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastckpt._api.checkpoint import Checkpoint
from fastckpt.exceptions import CheckpointError
from fastckpt.keep import Saved

if TYPE_CHECKING:
    from .directory import Identity
    from .tier import Place


FILE = ".fastckpt-run.json"
_VERSION = 1


class Catalogue:
    """When and with which metrics the checkpoints of a directory were saved.

    Args:
        directory: the run.
        keep: the policies in force, as text; None where one of them has no text, or where nobody says.
    """

    def __init__(self, directory: Place, keep: Sequence[str] | None = None) -> None:
        self.directory = directory
        # Reentrant: a signal handler that saves may come in between.
        self._lock = threading.RLock()
        self._known: dict[str, tuple[Identity, Saved]] = {}
        self._changed = False
        found = self._read()
        #: The policies of whoever wrote the file last, or those given.
        self.keep: list[str] | None = list(keep) if keep is not None else found
        self._changed = self._changed or self.keep != found

    def of(self, steps: Iterable[int]) -> list[Saved]:
        """What is known of these checkpoints, in the same order; those that cannot be opened are left out."""
        with self._lock:
            return [one for one in map(self._one, steps) if one is not None]

    def add(self, saved: Saved) -> None:
        """Note a checkpoint that has just been saved."""
        with self._lock:
            name = self.directory.names.name_of(saved.step)
            identity = self.directory.identity(name)
            if identity is not None:
                self._known[name] = identity, saved
                self._changed = True

    def write(self, steps: Iterable[int]) -> None:
        """Write the file, with what is known of these checkpoints.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            names = {self.directory.names.name_of(step) for step in steps}
            gone = self._known.keys() - names
            for name in gone:
                del self._known[name]
            if not self._changed and not gone:
                return
            known = {
                name: [*identity, saved.created, dict(saved.metrics)]
                for name, (identity, saved) in list(self._known.items())
            }
            document = {"version": _VERSION, "keep": self.keep, "checkpoints": known}
            self.directory.replace(FILE, json.dumps(document).encode(), durable=False)
            self._changed = False

    def _one(self, step: int) -> Saved | None:
        name = self.directory.names.name_of(step)
        identity = self.directory.identity(name)
        if identity is None:
            return None
        known = self._known.get(name)
        if known is not None and known[0] == identity:
            return known[1]
        try:
            saved = read(self.directory.path_of(step), step)
        except (CheckpointError, OSError):
            return None
        self._known[name] = identity, saved
        self._changed = True
        return saved

    def _read(self) -> list[str] | None:
        try:
            document = json.loads(self.directory.read(FILE))
            if document["version"] != _VERSION:
                return None
            for name, (changed, inode, written, created, metrics) in document["checkpoints"].items():
                step = self.directory.names.step_of(name)
                if step is not None:
                    self._known[name] = (changed, inode, written), Saved(step, float(created), _numbers(metrics))
            keep = document["keep"]
            return [str(one) for one in keep] if isinstance(keep, list) else None
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self._known.clear()
            return None


def read(path: str, step: int) -> Saved:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: it is damaged, or none.
        OSError: it cannot be read.
    """
    with Checkpoint(path) as checkpoint:
        created, metadata = checkpoint.origin.created, checkpoint.metadata
    metrics = metadata.get("metrics") if isinstance(metadata, dict) else None
    return Saved(step, created, _numbers(metrics))


def _numbers(metrics: Any) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            found[str(name)] = float(value)
    return found
