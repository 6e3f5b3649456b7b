"""Runs the whole stack on a simulated disk: seeds draw programs and power cuts, a hundred thousand states an hour.

    python -m tests.faults.simulated_command --states 1000000 --seed 1 --results target/faults/simulated.json

The real product runs, from the Manager and the commit of ranks down to io_uring, on a mount that records each operation
in order (``simulated_mount.py``). The record is replayed into a model of a disk that promises no more than POSIX
(``simulated_disk.py``), and at each point of it power cuts are drawn. The product reads the resulting states and saves
over them (``simulated_reader.py``). So no test code replaces product code, all interfaces are the kernel's, and a
mutant with a missing sync is a record without that sync (``simulated_mutants.py``). Time does not matter: no tested
promise depends on it.

The seed determines a program, its states and, except for the schedule of its threads, its record. The record of a
program that broke a promise is kept beside the results, and ``--record`` tries that record again. A stopped command
continues where it stopped.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.served import Mount
from faults.simulated_disk import MODES, Disk, Mark, Names, Reboot
from faults.simulated_oracle import Oracle
from faults.simulated_programs import draw_program
from harness import groups, zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.simulated_reader import Reader

#: One out of this many states is not only read: the program also saves over it.
GO_ON = 8
#: One out of this many programs has several ranks.
RANKS = 8
#: The rules under which changes of names become durable in their order, so that no leftovers may remain.
IN_ORDER = ("ordered", "all", "none")


class Stage:
    """The place where programs run: a mount, and processes to fork from."""

    def __init__(self, mount: Mount, alone: zygote.Zygote, place: Path) -> None:
        self.mount, self.alone, self.place = mount, alone, place
        self.forge: groups.Forge | None = None

    def record(self, program: dict[str, Any], seed: str) -> list[Any]:
        """Run a program to its end or its kills, and return its record."""
        draw = random.Random(f"{seed} ends")
        self.mount.ask(reset=True, exchange=program["exchange"])
        for number, phase in enumerate(program["phases"]):
            if program["ranks"] > 1:
                self._by_ranks(program, number, draw)
            else:
                child = self.alone.start("faults.simulated_programs:run", hold=True, **self._given(program, number))
                if phase["kill"]:
                    self.mount.ask(kill=[child.pid], at=phase["kill"])
                child.go()
                with contextlib.suppress(zygote.DiedError):
                    outcome = child.outcome(60)
                    if isinstance(outcome, zygote.Raised):
                        raise AssertionError(outcome.trace)  # noqa: TRY004 - of the program
                self.mount.ask(kill=[], at=0)
            if phase["reboot"] is not None:
                self.mount.ask(reboot=phase["reboot"])
        path = self.place / "record"
        self.mount.ask(record=str(path))
        found: list[Any] = pickle.loads(path.read_bytes())
        return found

    def _given(self, program: dict[str, Any], number: int) -> dict[str, Any]:
        return {"point": self.mount.point, "program": program, "phase": number}

    def _by_ranks(self, program: dict[str, Any], number: int, draw: random.Random) -> None:
        from faults import simulated_programs

        assert self.forge is not None
        kill = program["phases"][number]["kill"]
        with self.forge.group(program["ranks"]) as group:
            doomed = [child.pid for child in group.children]
            if draw.random() < 0.3:
                doomed = draw.sample(doomed, 1)
            if kill:
                self.mount.ask(kill=doomed, at=kill)
            group.start(simulated_programs.perform, self.mount.point, program, number)
            for outcome in group.outcomes(60):
                if outcome.raised is not None and not kill:
                    raise AssertionError(outcome.raised.trace)
            self.mount.ask(kill=[], at=0)


@contextlib.contextmanager
def stage(*, ranks: bool = False) -> Iterator[Stage]:
    """A place where programs run, and a place in memory where their states are read."""
    with (
        tempfile.TemporaryDirectory(prefix="fastckpt-simulated-", dir="/dev/shm") as name,
        contextlib.ExitStack() as all_,
    ):
        place = Path(name)
        (place / "point").mkdir()
        alone = all_.enter_context(zygote.running(env={"FASTCKPT_TEST_IMPORT": "faults.simulated_programs"}))
        mount = Mount(str(place / "point"), "faults.simulated_mount")
        all_.callback(mount.close)
        made = Stage(mount, alone, place)
        if ranks:
            made.forge = all_.enter_context(groups.forge())
        yield made


@dataclass
class Tally:
    """The findings in the states of a program.

    Attributes:
        drawn: the number of power cuts.
        states: the number of distinct states.
        over: the number of states that were saved over.
        wrong: the violations, as the operation before the cut, the rule, and the finding.
    """

    drawn: int = 0
    states: int = 0
    over: int = 0
    wrong: list[tuple[int, str, str]] = field(default_factory=list)


def explore(
    record: list[Any], program: dict[str, Any], reader: Reader, seed: str, wanted: int, *, most: int = 3
) -> Tally:
    """Cut the power at drawn points of a record, and judge the resulting states."""
    tally, draw = Tally(), random.Random(f"{seed} states")
    points = _points(record, wanted, draw)
    disk, oracle = Disk(), Oracle()
    seen: dict[int, Any] = {}
    trees: set[int] = set()
    in_order = True
    for at, operation in enumerate(record):
        if isinstance(operation, Mark):
            oracle.hear(operation.said)
        else:
            disk.apply(operation)
            in_order = in_order and not isinstance(operation, Reboot)
        for _ in range(points[at]):
            mode = draw.choices(list(MODES), list(MODES.values()))[0]
            found = disk.crash(draw, mode)
            tally.drawn += 1
            # The checks depend on the marks before the cut.
            tree = reader.key(found)
            trees.add(tree)
            key = hash((tree, len(oracle.places), len(oracle.runs)))
            if key not in seen:
                go_on = draw.random() < 1 / GO_ON
                seen[key] = reader.look(found, program, oracle, go_on=go_on)
                tally.over += go_on
            what = dict(seen[key])
            litter = what.pop("litter", None)
            wrong = oracle.judge(what)
            if litter and in_order and mode in IN_ORDER:
                wrong.append(f"a save has left {litter}")
            tally.wrong += [(at, mode, why) for why in wrong]
            if len(tally.wrong) >= most:
                break
        if len(tally.wrong) >= most:
            break
    tally.states = len(trees)
    reader.clear()
    return tally


def _points(record: list[Any], wanted: int, draw: random.Random) -> Counter[int]:
    """Return how often to cut after each operation: more often if more may be lost, and around renames and marks."""
    disk, weights = Disk(), []
    for operation in record:
        if not isinstance(operation, Mark):
            disk.apply(operation)
        turns = isinstance(operation, Mark) or (isinstance(operation, Names) and len(operation.changes) > 1)
        weights.append(min(1 + disk.unsynced, 5) + 6 * turns)
    return Counter(draw.choices(range(len(record)), weights, k=wanted)) if record else Counter()


def program_of(seed: str) -> dict[str, Any]:
    """Return the program of a seed; some programs have several ranks."""
    number = int(seed.rpartition("-")[2])
    return draw_program(seed, ranks=number % RANKS == RANKS - 1)


def attempt(stage: Stage, reader: Reader, seed: str, wanted: int) -> tuple[dict[str, Any], list[Any], Tally]:
    """Return the program of a seed, its record, and the findings of its power cuts."""
    program, record = program_of(seed), []
    try:
        record = stage.record(program, seed)
        return program, record, explore(record, program, reader, seed, wanted)
    except AssertionError as error:
        return program, record, Tally(wrong=[(0, "without one", f"the program failed: {error}")])
