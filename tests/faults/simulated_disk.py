"""A disk as weak as POSIX permits: the possible results of a power cut after recorded operations.

Only synced data is sure to last. A sync of a file covers the file's current bytes and length, but not its name; a sync
of a directory covers the names in it, but no file. Any change that no sync covers may be lost separately and in any
order: each page of 4 KiB of each write, each change of a length, each change of names. These rules still hold: a rename
or an exchange is whole or lost; a change of a name does not last without the previous change of that name; a directory
has one name. Names of files change independently of one another, because no rule forbids it.

A :class:`Disk` applies operations one by one. :meth:`Disk.crash` draws a :class:`State`: the directories and the
contents that the machine would find after a cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

#: The root directory.
ROOT = 1
#: The unit that a device writes whole or not at all.
PAGE = 4096
#: The rules for unsynced changes, by one of which a state is drawn, and their frequencies.
MODES = {"any": 6, "ordered": 3, "all but one": 4, "one alone": 2, "none": 1, "all": 1}
#: The odds that an unsynced change lasts, drawn once per state.
ODDS = (0.1, 0.5, 0.9)


class Make(NamedTuple):
    """A file or a directory is created, without a name."""

    node: int
    folder: bool


class Write(NamedTuple):
    """Bytes are written."""

    node: int
    at: int
    data: bytes


class Size(NamedTuple):
    """A file gets another length."""

    node: int
    size: int


class Names(NamedTuple):
    """Names change, all at once. Each change: directory, name, and the node that then has the name (0: none)."""

    changes: tuple[tuple[int, str, int], ...]


class Sync(NamedTuple):
    """A file or a directory is synced."""

    node: int


class Mark(NamedTuple):
    """The program sets a mark."""

    said: dict[str, Any]


class Reboot(NamedTuple):
    """The power was cut, and the machine found these contents of files and names in directories."""

    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]


@dataclass
class File:
    """A file: the bytes that last, and the changes that may be lost."""

    base: bytes = b""
    pending: list[Write | Size] = field(default_factory=list)

    def content(self, kept: Iterable[int]) -> bytes:
        """Return the bytes if these changes last."""
        data = bytearray(self.base)
        for number in kept:
            change = self.pending[number]
            if isinstance(change, Size):
                del data[change.size :]
                data.extend(bytes(change.size - len(data)))
            else:
                data.extend(bytes(max(0, change.at - len(data))))
                data[change.at : change.at + len(change.data)] = change.data
        return bytes(data)


@dataclass(frozen=True)
class Change:
    """A change of names that may be lost, and the changes on which it depends."""

    changes: tuple[tuple[int, str, int], ...]
    needs: frozenset[int]


class State(NamedTuple):
    """The files and directories that a machine finds after a cut, by path: contents of files, None for directories."""

    tree: dict[str, bytes | None]
    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]


class Disk:
    """Applies operations, and draws the results of a power cut."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.names: dict[int, Change] = {}
        self._number = 0

    def apply(self, operation: Any) -> None:
        """Apply an operation."""
        if isinstance(operation, Write):
            self._write(operation)
        elif isinstance(operation, Names):
            self._rename(operation.changes)
        elif isinstance(operation, Sync):
            self._sync(operation.node)
        elif isinstance(operation, Size):
            self.files[operation.node].pending.append(operation)
        elif isinstance(operation, Make):
            if operation.folder:
                self.folders[operation.node] = {}
            else:
                self.files[operation.node] = File()
        elif isinstance(operation, Reboot):
            self.files = {node: File(data) for node, data in operation.files.items()}
            self.folders = {node: dict(names) for node, names in operation.folders.items()}
            self.names = {}

    def _write(self, write: Write) -> None:
        pending, done = self.files[write.node].pending, 0
        while done < len(write.data):
            step = PAGE - (write.at + done) % PAGE
            pending.append(Write(write.node, write.at + done, write.data[done : done + step]))
            done += step

    def _rename(self, changes: tuple[tuple[int, str, int], ...]) -> None:
        names = {(folder, name) for folder, name, _ in changes}
        moved = {node for _, _, node in changes if node in self.folders}
        needs = {
            number
            for number, other in self.names.items()
            for folder, name, node in other.changes
            if (folder, name) in names or node in moved
        }
        self._number += 1
        self.names[self._number] = Change(changes, frozenset(needs))

    def _sync(self, node: int) -> None:
        file = self.files.get(node)
        if file is not None:
            file.base = file.content(range(len(file.pending)))
            file.pending.clear()
            return
        lasting: set[int] = set()
        for number in sorted(self.names, reverse=True):
            change = self.names[number]
            if number in lasting or any(folder == node for folder, _, _ in change.changes):
                lasting |= {number, *change.needs}
        for number in sorted(lasting & self.names.keys()):
            self._name(self.folders, self.names.pop(number))

    @staticmethod
    def _name(folders: dict[int, dict[str, int]], change: Change) -> None:
        for folder, name, node in change.changes:
            if node:
                folders[folder][name] = node
            else:
                folders[folder].pop(name, None)

    @property
    def unsynced(self) -> int:
        """Return how many changes may be lost."""
        return len(self.names) + sum(len(file.pending) for file in self.files.values())

    def crash(self, draw: random.Random, mode: str = "") -> State:
        """Draw a state by the rule ``mode``."""
        mode = mode or draw.choices(list(MODES), list(MODES.values()))[0]
        names, bytes_ = self._kept(draw, mode)
        folders = dict(self.folders)
        if names:
            folders = {node: dict(inside) for node, inside in folders.items()}
            for number in names:
                self._name(folders, self.names[number])
        tree: dict[str, bytes | None] = {}
        files: dict[int, bytes] = {}
        found: dict[int, dict[str, int]] = {}
        self._walk(ROOT, "", folders, (tree, files, found), bytes_)
        return State(tree, files, found)

    def _walk(
        self,
        node: int,
        path: str,
        folders: dict[int, dict[str, int]],
        out: tuple[dict[str, bytes | None], dict[int, bytes], dict[int, dict[str, int]]],
        kept: dict[int, list[int]],
    ) -> None:
        tree, files, found = out
        found[node] = folders[node]
        for name, inner in folders[node].items():
            below = f"{path}/{name}" if path else name
            if inner in folders:
                tree[below] = None
                self._walk(inner, below, folders, out, kept)
                continue
            if inner not in files:
                files[inner] = self.files[inner].content(kept.get(inner, ()))
            tree[below] = files[inner]

    def _kept(self, draw: random.Random, mode: str) -> tuple[list[int], dict[int, list[int]]]:
        """Return the lasting changes of names, and of each file."""
        pending = {node: len(file.pending) for node, file in self.files.items() if file.pending}
        whole = {node: list(range(count)) for node, count in pending.items()}
        if mode == "all":
            return list(self.names), whole
        if mode == "none":
            return [], {}
        if mode in {"all but one", "one alone"}:
            return self._one(draw, whole, lost=mode == "all but one")
        likely, kept = draw.choice(ODDS), []
        if mode == "ordered":
            order = list(self.names)
            kept = order[: draw.randint(0, len(order))]
        else:
            for number, change in self.names.items():
                if draw.random() < likely and all(need in kept or need not in self.names for need in change.needs):
                    kept.append(number)
        # Some files last or are lost as a whole, others page by page.
        likely = draw.choice(ODDS)
        parts = {
            node: [one for one in numbers if draw.random() < likely] if draw.random() < 0.5 else numbers
            for node, numbers in whole.items()
            if draw.random() < 0.9
        }
        return kept, parts

    def _one(
        self, draw: random.Random, whole: dict[int, list[int]], *, lost: bool
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Keep all unsynced changes except one and those that depend on it, or keep that one alone."""
        things = [*self.names, *(-node for node in whole)]
        if not things:
            return [], {}
        one = draw.choice(things)
        if lost and one < 0:
            return list(self.names), {node: numbers for node, numbers in whole.items() if node != -one}
        if one < 0:
            return [], {-one: whole[-one]}
        gone, needed = {one}, {one}
        for number, change in self.names.items():
            if change.needs & gone:
                gone.add(number)
        for number in sorted(self.names, reverse=True):
            if number in needed:
                needed |= self.names[number].needs
        if lost:
            return [number for number in self.names if number not in gone], whole
        return [number for number in self.names if number in needed], {}
