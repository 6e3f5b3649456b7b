"""Facts about each checkpoint of a run: when it was saved, its metrics, and which checkpoint it continues.

All facts are in the checkpoint's own metadata. Reading them opens its manifest, so they are cached in a file,
``.fastckpt-run.json``, beside the policies in force. An entry counts only while the checkpoint is the same one, by
:meth:`.directory.Directory.identity`. Without the file, or with a damaged one, all facts are read again from the
checkpoints. The file also has the last save's place in the lineage, so that its branch is followed even if its
checkpoint has lost its manifest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._api.checkpoint import Checkpoint
from fastckpt.exceptions import CheckpointError
from fastckpt.keep import Saved

from . import lineage
from .lineage import Lineage

if TYPE_CHECKING:
    from .directory import Identity
    from .prefix import Place


logger = logging.getLogger("fastckpt")

FILE = ".fastckpt-run.json"
_VERSION = 2
#: The most manifests that are read at the same time: each manifest of a remote tier costs a round trip.
_AT_A_TIME = 16


class Entry(NamedTuple):
    """The facts about one checkpoint: those for policies, and its place in the lineage."""

    saved: Saved
    lineage: Lineage


class Catalogue:
    """The facts in the checkpoints of a tier.

    Args:
        place: the tier's place.
        keep: the policies in force, as text; None if one of them has no text, or if they are unknown.
    """

    def __init__(self, place: Place, keep: Sequence[str] | None = None) -> None:
        self._place = place
        # Reentrant: a signal handler that saves may run in between.
        self._lock = threading.RLock()
        self._known: dict[str, tuple[Identity, Entry]] = {}
        self._changed = False
        #: The place in the lineage of the last save ever seen here.
        self.last = Lineage(0)
        found = self._read()
        #: The policies of the manager that wrote the file last, or the given ones.
        self.keep: list[str] | None = list(keep) if keep is not None else found
        self._changed = self._changed or self.keep != found

    @property
    def order(self) -> int:
        """The highest order of all saves ever seen here, on any branch."""
        return max([self.last.order, *(entry.lineage.order for _, entry in [*self._known.values()])])

    def entries(self, steps: Iterable[int], aside: Container[int] = ()) -> dict[int, Entry]:
        """The facts about these checkpoints, in the same order, without those that cannot be opened.

        Checkpoints that a killed save moved ``aside`` have no identity. Reading such a checkpoint moves it back.
        """
        with self._lock:
            found: dict[int, Entry | None] = {}
            unknown: list[tuple[int, str, Identity | None]] = []
            for step in steps:
                name = self._place.names.name_of(step)
                identity = self._place.identity(name)
                known = self._known.get(name)
                found[step] = known[1] if known is not None and known[0] == identity else None
                if found[step] is None and (identity is not None or step in aside):
                    unknown.append((step, name, identity))
            if len(unknown) > _AT_A_TIME:
                with ThreadPoolExecutor(_AT_A_TIME, "fastckpt-look") as threads:
                    fresh = [*threads.map(self._read_one, unknown)]
            else:
                fresh = [self._read_one(one) for one in unknown]
            for (step, name, identity), entry in zip(unknown, fresh, strict=True):
                found[step] = entry
                if entry is not None and identity is not None:
                    self._note(name, identity, entry)
            return {step: entry for step, entry in found.items() if entry is not None}

    def tip(self, entries: Mapping[int, Entry]) -> Lineage:
        """The last save's place in the lineage."""
        return lineage.last([self.last, *(entry.lineage for entry in entries.values())])

    def own(self, entries: Mapping[int, Entry]) -> dict[int, Entry]:
        """The entries of the branch that saved last, or that may belong to it."""
        tip = self.tip(entries)
        return {step: entry for step, entry in entries.items() if not tip.has_left(step, entry.lineage)}

    def add(self, entry: Entry) -> None:
        """Add a checkpoint that has just been saved."""
        with self._lock:
            name = self._place.names.name_of(entry.saved.step)
            identity = self._place.identity(name)
            if identity is not None:
                self._note(name, identity, entry)

    @contextlib.contextmanager
    def going_back(self, place: Lineage, *, needed: bool) -> Iterator[None]:
        """A context that records that the run goes back, unless it raises; until the next save this is the only record.

        Raises:
            OSError: the record cannot be made durable, and is ``needed``.
        """
        before = self.last
        try:
            self._go(place, needed=needed)
            yield
        except BaseException:
            self._go(before, needed=False)
            raise

    def write(self, steps: Iterable[int] | None = None, *, durable: bool = False) -> None:
        """Write the file, with the facts about these checkpoints; None: all known ones.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            names = self._known if steps is None else {self._place.names.name_of(step) for step in steps}
            gone = self._known.keys() - names
            for name in gone:
                del self._known[name]
            if not self._changed and not gone:
                return
            known = {
                name: [*identity, saved.created, dict(saved.metrics), place, dict(saved.changed)]
                for name, (identity, (saved, place)) in list(self._known.items())
            }
            document = {"version": _VERSION, "keep": self.keep, "last": self.last, "checkpoints": known}
            self._place.replace(FILE, json.dumps(document).encode(), durable=durable)
            self._changed = False

    def _go(self, place: Lineage, *, needed: bool) -> None:
        with self._lock:
            self.last, self._changed = place, True
            try:
                self.write(durable=True)
                self._place.settle()
            except OSError as error:
                if needed:
                    raise
                logger.warning("%s: cannot record which branch continues: %s", self._place.path, error)

    def _note(self, name: str, identity: Identity, entry: Entry) -> None:
        self._known[name] = identity, entry
        self.last = lineage.last([self.last, entry.lineage])
        self._changed = True

    def _read_one(self, one: tuple[int, str, Identity | None]) -> Entry | None:
        step, _, _ = one
        try:
            return read(self._place.path_of(step), step)
        except (CheckpointError, OSError):
            return None

    def _read(self) -> list[str] | None:
        try:
            document = json.loads(self._place.read(FILE))
            if document["version"] != _VERSION:
                return None
            for name, (changed, inode, written, *about) in document["checkpoints"].items():
                step = self._place.names.step_of(name)
                if step is not None:
                    created, metrics, place, share = about
                    saved = Saved(step, float(created), _numbers(metrics), _numbers(share))
                    self._known[name] = (changed, inode, written), Entry(saved, lineage.parse(place))
            self.last = lineage.parse(document["last"])
            keep = document["keep"]
            return [str(one) for one in keep] if isinstance(keep, list) else None
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self._known.clear()
            return None


def read(path: str, step: int) -> Entry:
    """The facts in a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or the path is not a checkpoint.
        OSError: the directory cannot be read.
    """
    with Checkpoint(path) as checkpoint:
        created, metadata = checkpoint.origin.created, checkpoint.metadata
    metrics = metadata.get("metrics") if isinstance(metadata, dict) else None
    return Entry(Saved(step, created, _numbers(metrics)), lineage.of(metadata, created))


def _numbers(metrics: Any) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            found[str(name)] = float(value)
    return found
