"""Records of faulty programs: each mutant is exactly one mistake in a record.

For a missing sync, a mutant deletes the sync; for a wrong order or a premature acknowledgement, it moves an entry. A
mutant that finds nothing to change in a record returns None.
"""

from __future__ import annotations

import random
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from faults.simulated import explore
from faults.simulated_disk import Make, Mark, Names, Reboot, Sync
from faults.simulated_programs import draw_program
from faults.simulated_reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.simulated import Stage

Record = list[Any]


class Places:
    """Finds the names of nodes at each operation of a record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        #: For each operation that is a sync: directory and name of the synced node.
        self.synced: dict[int, tuple[int, str]] = {}
        #: Operations that give a checkpoint, or a file, its name: directory and node.
        self.published: dict[int, tuple[int, int]] = {}
        self.files: dict[int, int] = {}
        named: dict[int, tuple[int, str]] = {1: (0, "")}
        for at, operation in enumerate(record):
            if isinstance(operation, Reboot):
                named.update(
                    {node: (up, name) for up, all_ in operation.folders.items() for name, node in all_.items()}
                )
            elif isinstance(operation, Sync):
                self.synced[at] = named.get(operation.node, (0, ""))
            elif isinstance(operation, Names):
                hidden = any(name.startswith(".") or name == "data" for _, name, _ in operation.changes)
                for folder, name, node in operation.changes:
                    if node and hidden and not name.startswith(".") and len(operation.changes) == 2:
                        self.published[at] = (folder, node)
                    if node:
                        named[node] = (folder, name)
                        self.files[node] = folder

    def without(self, dropped: set[int]) -> Record | None:
        """Return the record without these operations."""
        return [each for at, each in enumerate(self.record) if at not in dropped] if dropped else None

    def syncs(self, fits: Callable[[str], bool]) -> set[int]:
        """Return the syncs of nodes whose names fit."""
        return {at for at, (_, name) in self.synced.items() if fits(name)}

    def next_sync(self, at: int, folder: int) -> int | None:
        """Return the first sync of a directory after an operation and before the next mark."""
        for later in range(at + 1, len(self.record)):
            if isinstance(self.record[later], Mark):
                return None
            if isinstance(self.record[later], Sync) and self.record[later].node == folder:
                return later
        return None


def _one_shard(places: Places, draw: random.Random) -> Record | None:
    nodes = sorted({places.record[at].node for at in places.syncs(lambda name: name.endswith(".safetensors"))})
    if not nodes:
        return None
    one = draw.choice(nodes)
    return places.without({at for at in places.synced if places.record[at].node == one})


def _named(*names: str) -> Callable[[Places, random.Random], Record | None]:
    return lambda places, _: places.without(places.syncs(lambda name: name in names))


def _workspace(places: Places, _: random.Random) -> Record | None:
    return places.without(places.syncs(lambda name: ".tmp-" in name or ".copy-" in name))


def _parent(places: Places, _: random.Random) -> Record | None:
    found = {places.next_sync(at, folder) for at, (folder, _) in places.published.items()}
    return places.without({at for at in found if at is not None})


def _above(places: Places, _: random.Random) -> Record | None:
    """Delete the syncs that make the names of new directories above the checkpoint durable."""
    dropped = set()
    for at, operation in enumerate(places.record[:-2]):
        if isinstance(operation, Make) and operation.folder and isinstance(places.record[at + 1], Names):
            folder, name, _ = places.record[at + 1].changes[0]
            after = places.record[at + 2]
            if not name.startswith(".") and isinstance(after, Sync) and after.node == folder:
                dropped.add(at + 2)
    return places.without(dropped)


def _pin(places: Places, _: random.Random) -> Record | None:
    """Delete the sync of the directory in which a pin is set."""
    dropped = set()
    for at, operation in enumerate(places.record):
        if isinstance(operation, Names) and operation.changes[0][1].endswith(".pin") and operation.changes[0][2]:
            dropped.add(places.next_sync(at, operation.changes[0][0]))
    return places.without({at for at in dropped if at is not None})


def _before_two_renames(places: Places, _: random.Random) -> Record | None:
    """Delete the sync after which the old checkpoint is moved aside if names cannot be exchanged."""
    dropped = set()
    for at, operation in enumerate(places.record):
        if isinstance(operation, Names) and any(".old-" in name and node for _, name, node in operation.changes):
            dropped |= {at - 1} & places.synced.keys()
    return places.without(dropped)


def _rename_first(places: Places, _: random.Random) -> Record | None:
    """Give a checkpoint its name before its files are synced."""
    record, moved = list(places.record), False
    for at, (folder, node) in sorted(places.published.items()):
        inside = [one for one in places.synced if one < at and places.files.get(places.record[one].node) == node]
        if not inside:
            continue
        # If the save needs two renames, move the first one, too.
        before = at - 1 if isinstance(record[at - 1], Names) and record[at - 1].changes[0][0] == folder else at
        first = min(one for one in inside if one > _begin(places.record, at))
        record[first : at + 1] = [*record[before : at + 1], *record[first:before]]
        moved = True
    return record if moved else None


def _begin(record: Record, at: int) -> int:
    return max((one for one in range(at) if isinstance(record[one], Mark)), default=-1)


def _remove_first(places: Places, _: random.Random) -> Record | None:
    """Remove a replaced or unwanted checkpoint before the new one is durable."""
    record: Record = []
    held: dict[int, Any] = {}
    publishing = -1
    for at, operation in enumerate(places.record):
        if isinstance(operation, (Mark, Make)):
            record += held.values()
            held, publishing = {}, -1
        if at in places.published:
            publishing = places.published[at][0]
        if isinstance(operation, Sync) and operation.node == publishing:
            held[operation.node] = operation
        else:
            record.append(operation)
    record += held.values()
    return record if record != places.record else None


def _early(places: Places, _: random.Random) -> Record | None:
    """Acknowledge a save once it has its name, before the name is durable."""
    record, last, moved = [], -1, False
    for at, operation in enumerate(places.record):
        if isinstance(operation, Mark) and operation.said["event"] == "ack" and last >= 0:
            record.insert(last, operation)
            last, moved = -1, True
            continue
        record.append(operation)
        if at in places.published:
            last = len(record)
    return record if moved else None


#: By name: the mistake, and the kinds of programs that reveal it.
MUTANTS: dict[str, tuple[Callable[[Places, random.Random], Record | None], tuple[str, ...]]] = {
    "one shard is not synced": (_one_shard, ("saves", "base", "manager", "copy")),
    "the manifest is not synced": (_named("fastckpt.json"), ("saves", "base", "manager")),
    "files given by the program are not synced": (_named("config.json"), ("saves",)),
    "a single file is not synced": (_named("data"), ("file",)),
    "the directory of the training's shards is not synced": (_named("training"), ("saves", "base", "manager")),
    "the workspace is not synced": (_workspace, ("saves", "base", "manager", "copy")),
    "the parent is not synced": (_parent, ("saves", "base", "file", "copy")),
    "the directories above are not synced": (_above, ("saves", "manager")),
    "the parent is not synced before two renames": (_before_two_renames, ("saves", "base")),
    "a pin is not synced": (_pin, ("manager",)),
    "the name comes before the syncs": (_rename_first, ("saves", "base", "manager")),
    "the old one is removed before the new one is durable": (_remove_first, ("saves", "base", "file")),
    "the acknowledgement comes early": (_early, ("saves", "base", "file")),
}


def mutate(name: str, record: Record, seed: str) -> Record | None:
    """Return the record with one mistake, or None if the record has no place for it."""
    return MUTANTS[name][0](Places(record), random.Random(f"{seed} {name}"))


class Catcher:
    """Searches for a program that a mutant breaks; all mutants share the records.

    Args:
        stage: the place where the programs run.
        seed: the seed of the programs.
        states: the power cuts of each program.
    """

    #: The number of programs within which a mutant must be caught.
    TRIES = 30

    def __init__(self, stage: Stage, seed: int, states: int = 300) -> None:
        self.stage, self.seed, self.states = stage, seed, states
        self.reader = Reader(stage.place)
        self.records: dict[tuple[str, int], tuple[dict[str, Any], Record]] = {}

    def caught(self, name: str) -> str:
        """Return which program catches the mutant, and how; empty if none does."""
        for number, kind in enumerate(islice(cycle(MUTANTS[name][1]), self.TRIES)):
            program, record = self._record(kind, number)
            changed = mutate(name, record, str(number))
            if changed is None:
                continue
            wrong = explore(changed, program, self.reader, str(number), self.states, most=1).wrong
            if wrong:
                return f"program {number} ({kind}), after operation {wrong[0][0]}: {wrong[0][2]}"
        return ""

    def _record(self, kind: str, number: int) -> tuple[dict[str, Any], Record]:
        if (kind, number) not in self.records:
            seed = f"{self.seed}-{number}"
            program = draw_program(seed, kind=kind)
            self.records[kind, number] = program, self.stage.record(program, seed)
        return self.records[kind, number]
