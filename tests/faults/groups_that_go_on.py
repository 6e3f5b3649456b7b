"""Groups of ranks that continue after an event: drawn events at drawn entry points.

A trial has a group of two to four processes, which make the same call five times. Ranks meet before each call, as in
training, or do not. In one call, an event happens: a rank misses the call, its state cannot be saved, it or the
group's store is stopped, or its program leaves the manager. Any outcome of that call and, if ranks do not meet, of the
next call is allowed. All later calls must succeed on all ranks. If a rank's save returned, the checkpoint must be there
and belong to one call; if a rank's error says that nothing was committed, nothing may be there.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
import fastckpt.dcp
import fastckpt.distributed
from fastckpt.distributed import Ranks
from harness import groups, parallel

CALLS = 5
#: Timeout in seconds of the call with the event, and of the other calls.
SHORT, LONG = 1.5, 60.0
ONE_THREAD = fastckpt.IO(threads=1)
NOTHING = "nothing was committed"
#: The exceptions that the program may get.
FAILURES = (fastckpt.CheckpointError, RuntimeError, ValueError, OSError, CheckpointException)


class LeftError(Exception):
    """The program of a rank fails outside of any call."""


@dataclass(frozen=True)
class Trial:
    """A drawn trial.

    Attributes:
        size: the number of ranks.
        entry: the called function.
        event: the event.
        odd: the rank to which the event happens.
        at: the number of the call in which the event happens.
        meets: whether ranks meet before each call.
        store: the process that has the store.
        after: seconds from the start of the call until the stop; 0: the stop comes first.
        still: the duration of the stop, in seconds.
    """

    size: int
    entry: str
    event: str
    odd: int
    at: int
    meets: bool
    store: str
    after: float
    still: float

    @property
    def free(self) -> list[int]:
        """Return the numbers of the calls that may fail."""
        # Restores do not differ, so a rank that missed a restore first counts as late. A manager's next save reports
        # the failure of the last save in the background, if that failed after the wait: perhaps on one rank only, and
        # then the other ranks wait for it.
        told_next = (
            self.entry == "manager_without_wait"
            or (self.entry, self.event) == ("restore", "missed")
            or (self.entry == "manager" and (self.event.endswith("still") or self.event == "between"))
        )
        count = 1 if self.meets and not told_next else 2
        # A short call may end before the stop.
        return [*range(self.at, self.at + count + bool(self.after))]

    @property
    def short(self) -> list[int]:
        """Return the numbers of the calls with a short timeout."""
        return self.free if self.entry in MANAGED else [self.at]


def state(number, *, bad=False):
    """Return a state in which each element shows its call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((64, 100), float(number))
    made = {"w": parallel.distributed(whole, mesh, [Shard(0)]), "b": torch.full((7,), float(number)), "step": number}
    return {**made, "bad": object()} if bad else made


def save_over(path, number):
    """Save on a rank, over the previous checkpoint."""
    fastckpt.distributed.save(state(number), f"{path}/step", ranks=Ranks(timeout=LONG), io=ONE_THREAD)


class Alone:
    """The calls of a program without a manager. ``call`` makes the call of a number, to ``path``."""

    def __init__(self, path, entry):
        self.path, self.entry = path, entry

    def prepare(self):
        """Make the checkpoints to load."""
        if self.entry in {"load", "dcp_load"}:
            for number in range(CALLS):
                fastckpt.distributed.save(
                    state(number), f"{self.path}/there-{number}", ranks=Ranks(timeout=LONG), io=ONE_THREAD
                )

    def call(self, number, timeout, bad):
        """Make one call."""
        getattr(self, self.entry)(number, timeout, bad)

    def save(self, number, timeout, bad):
        """Each save has a separate path."""
        fastckpt.distributed.save(
            state(number, bad=bad), f"{self.path}/step-{number}", ranks=Ranks(timeout=timeout), io=ONE_THREAD
        )

    def save_over(self, number, timeout, bad):
        """Each save replaces the previous checkpoint."""
        fastckpt.distributed.save(
            state(number, bad=bad), f"{self.path}/step", ranks=Ranks(timeout=timeout), io=ONE_THREAD
        )

    def save_async(self, number, timeout, bad):
        """Saves in the background."""
        given = state(number, bad=bad)
        fastckpt.distributed.save_async(
            given, f"{self.path}/step-{number}", ranks=Ranks(timeout=timeout), io=ONE_THREAD
        ).result(LONG)

    def dcp_save(self, number, timeout, bad):
        """Saves with torch's function."""
        writer = fastckpt.dcp.Writer(f"{self.path}/step-{number}", ranks=Ranks(timeout=timeout), io=ONE_THREAD)
        torch_dcp.save(state(number, bad=bad), storage_writer=writer)

    def dcp_load(self, number, timeout, bad):
        """Likewise."""
        into = {**state(0), **({"more": torch.ones(3)} if bad else {})}
        torch_dcp.load(
            into, storage_reader=fastckpt.dcp.Reader(f"{self.path}/there-{number}", ranks=Ranks(timeout=timeout))
        )
        self.compare(into, number)

    def load(self, number, timeout, bad):
        """Each load has a different path, so that the loads are distinguishable."""
        name = "none" if bad else f"there-{number}"
        found = fastckpt.distributed.load(f"{self.path}/{name}", ranks=Ranks(timeout=timeout), io=ONE_THREAD)
        self.compare(found, number)

    def compare(self, found, number):
        """Check that the loaded state is the state of this number."""
        if (found["step"], *found["b"].tolist()) != (number, *[float(number)] * 7):
            raise AssertionError(f"{found['step']} in the place of {number}")


class Managed:
    """The calls of a program with a manager. ``path`` is the directory of the run."""

    def __init__(self, path, entry, odd):
        self.entry = entry
        self.manager = fastckpt.Manager(
            f"{path}/run", ranks=Ranks(timeout=LONG), async_save=entry != "manager" or odd % 2 == 0
        )

    def prepare(self):
        """Make the checkpoint to restore."""
        if self.entry == "restore":
            self.manager.save(1, state(1), force=True)
            self.manager.wait()

    def call(self, number, timeout, bad):
        """Do one step of a program."""
        manager, step = self.manager, number + 1
        manager._ranks._given = Ranks(timeout=timeout)
        if self.entry == "restore":
            found = manager.restore()
            if found.state["step"] != found.step:
                raise AssertionError(f"{found.state['step']} in the place of {found.step}")
            return
        if not manager.should_save(step):
            raise AssertionError(f"step {step} is not wanted")
        if bad == "between":
            raise LeftError
        manager.save(step, state(step, bad=bad))
        if self.entry == "manager" or number == CALLS - 1:
            manager.wait()


ALONE = ("save", "save_over", "save_async", "load", "dcp_save", "dcp_load")
MANAGED = ("manager", "manager_without_wait", "restore")
EVENTS = ("missed", "between", "bad", "leaves", "rank stands still", "store stands still")


def rank(trial, path):
    """Do the work of one rank; return the outcome of each call."""
    told = []
    while len(told) < CALLS:
        try:
            with contextlib.ExitStack() as stack:
                if trial.entry in ALONE:
                    program = Alone(path, trial.entry)
                else:
                    program = Managed(path, trial.entry, trial.odd)
                    stack.enter_context(program.manager)
                if not told:
                    program.prepare()
                one_life(trial, program, told, path)
        except LeftError:
            told.append("left")
        except FAILURES as error:
            # If another rank has left the manager, this rank also leaves it.
            if trial.event != "leaves":
                raise
            told.append(f"{type(error).__name__}: {error}")
        if len(told) < CALLS:
            dist.barrier()
    return told


def one_life(trial, program, told, path):
    """Make the remaining calls."""
    for number in range(len(told), CALLS):
        if trial.meets:
            dist.barrier()
        struck = number == trial.at and dist.get_rank() == trial.odd
        if number == trial.at:
            groups.report("begins")
            while trial.event.endswith("still") and not (trial.after or Path(path, "still").exists()):
                time.sleep(0.001)
        if struck and trial.event == "leaves":
            raise LeftError
        if struck and trial.event == "missed":
            told.append("missed")
            continue
        try:
            bad = trial.event if struck and trial.event in {"bad", "between"} else ""
            program.call(number, SHORT if number in trial.short else LONG, bad)
        except LeftError:
            told.append("missed")
        except FAILURES as error:
            if trial.event == "leaves" and number == trial.at:
                raise
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("ok")


def wrong_with(trial, told, path):
    """Return the fault of the ranks' outcomes or of the checkpoints, or an empty string."""
    for number in range(CALLS):
        said = [each[number] for each in told]
        wrong = [each for each in said if each != "ok" and not tells_of_an_earlier_save(trial, each, number + 1)]
        if number not in trial.free and wrong:
            return f"call {number}: {said}"
        if number != trial.at or trial.entry == "manager_without_wait":
            continue
        if trial.event == "bad" and "ok" in said:
            return f"a call with what cannot be saved or loaded: {said}"
        others = [each for which, each in enumerate(said) if which != trial.odd]
        if trial.event == "missed" and trial.meets and any(f"rank {trial.odd}" not in each for each in others):
            return f"the missed call: {said}"
    if trial.entry in {"load", "dcp_load", "restore"}:
        return ""
    for number in range(CALLS):
        said = [each[number] for each in told]
        managed = trial.entry in MANAGED
        step = number + 1 if managed else number
        where = Path(
            path, f"run/step-{step:08d}" if managed else "step" if trial.entry == "save_over" else f"step-{step}"
        )
        if trial.entry == "save_over":
            if number == CALLS - 1 and (why := not_of(where, step)):
                return f"call {number}: {why}"
            continue
        if (
            any(each == "ok" for each in said)
            and trial.entry != "manager_without_wait"
            and (why := not_of(where, step))
        ):
            return f"call {number}: a rank was told that it is saved: {why}"
        if where.exists() and any(NOTHING in each for each in said) and not managed:
            return f"call {number}: it is there: {said}"
        if where.exists() and (why := not_of(where, step)):
            return f"call {number}: {why}"
    return ""


def tells_of_an_earlier_save(trial, said, step):
    """Whether a new save reports an earlier save whose end was not awaited."""
    about = re.match(r"\w+: save: \S*/step-(\d+): ", said)
    return trial.entry == "manager_without_wait" and about is not None and int(about[1]) < step


def not_of(path, step):
    """Return why a checkpoint does not belong to a step, or an empty string."""
    try:
        found = fastckpt.load(path)
    except (fastckpt.CheckpointError, OSError) as error:
        return str(error)
    held = {*found["w"].flatten().tolist(), *found["b"].tolist()}
    return "" if (found["step"], held) == (step, {float(step)}) else f"step {found['step']}, elements {held}"


def drawn(draw):
    """Draw a trial."""
    entry = draw.choice((*ALONE, *MANAGED))
    # Ranks of dcp meet in torch's collectives, so no rank can miss a call. All restores are alike, so these ranks meet.
    together = entry.startswith("dcp") or entry == "restore"
    events = [
        each
        for each in EVENTS
        if not (each == "missed" and entry.startswith("dcp"))
        and not (each in {"between", "leaves"} and entry not in {"manager", "manager_without_wait"})
        and not (each == "bad" and entry == "restore")
    ]
    size, event = draw.choice((2, 3, 4)), draw.choice(events)
    return Trial(
        size,
        entry,
        event,
        draw.randrange(size),
        draw.choice((0, 1, 1, 2)),
        meets=together or event == "leaves" or draw.random() < 0.5,
        store=draw.choice(("apart", "apart", "rank0")),
        after=draw.choice((0.0, draw.uniform(0, 0.2))),
        still=SHORT * draw.uniform(0.5, 2.5),
    )


def wrong_of(forge, trial, path):
    """Run one trial; return its fault, or an empty string."""
    Path(path).mkdir(parents=True)
    with forge.group(trial.size, store=trial.store) as group:
        group.start(rank, trial, str(path))
        if trial.event.endswith("still"):
            for each in range(trial.size):
                group.heard(each)
            time.sleep(trial.after)
            of_store = trial.event.startswith("store")
            which = 0 if of_store else trial.odd
            apart = of_store and trial.store == "apart"
            group.stop_store() if apart else group.stop(which)
            Path(path, "still").touch()
            time.sleep(trial.still)
            group.resume_store() if apart else group.resume(which)
        outcomes = group.outcomes(3 * LONG)
        if any(each.kind != "returned" for each in outcomes):
            return str(groups.FailedError(outcomes))
    return wrong_with(trial, [each.value for each in outcomes], path)


def campaign(run):
    """Make the trials of a :class:`faults.row.Run`."""
    draw = run.draw
    with groups.forge() as forge:
        for number in range(run.trials):
            trial = drawn(draw)
            why = wrong_of(forge, trial, run.place / str(number))
            run.count(trial.event)
            run.done(why and f"seed {run.seed}, {number}: {trial}: {why}")
