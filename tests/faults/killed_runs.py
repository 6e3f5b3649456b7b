"""Kills a run during its saves, removals and restores, and checks the checkpoints after each kill.

A child forked for each round restores, saves and removes as fast as it can, with ``keep=1`` or 4, and tells its parent
when it begins a phase and which step is durable. The parent kills it at a random time after the beginning of a phase,
or preempts it, after which the child's current step must be durable. After each kill another child must be able to
restore, without a warning, the newest acknowledged step or a later one, bit for bit. Only the parent keeps the
acknowledged step, with which the result is compared.

The states contain the number of the round, which shows their order. In some rounds, the child first goes back to an
older step, with or without the removal of newer steps, and begins a branch from there. Once a step of it is
acknowledged, nothing of the abandoned branch may be restored, however high its steps are.

With a remote tier, a directory or the bucket of a server of S3 on loopback, which is not killed and keeps one
checkpoint, the drain is also a phase. After each kill the remote tier alone must have the newest step that was
acknowledged as drained, or a later one. A checkpoint that a killed run was about to remove may still be drained, and
does not count. In one round out of eight, the whole local tier is lost: then only drained steps count as acknowledged,
and the next child fetches the newest of them.

With several ranks, each rank is a child, and no child goes back. The children are killed in any order: all at once,
like a job, or one of them well before the others, as in the failure of a node.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from typing import NamedTuple

import numpy as np

import fastckpt
from harness import points

#: This is imported before any fork, because the first use imports more modules, a fifth of a second in each child.
Manager = fastckpt.Manager
PHASES = ("restore", "rollback", "save", "retention")
#: Further phases of a run with a remote tier: a drain and a fetch.
FAR = ("drain", "fetch")
#: A message of the child, with branch and step: a phase begins, all newer checkpoints are about to be removed, a step
#: is durable, or a step is durable in the remote tier.
MESSAGE = struct.Struct("=Bqq")
KINDS = (*PHASES, *FAR, "discard", "acknowledged", "drained")
#: The place (branch and step) before the first step.
NOTHING = (0, 0)
#: One of LOST rounds loses the local tier, one of PREEMPTED has a preemption, one of BACK goes back to an older step.
LOST, PREEMPTED, BACK = 8, 6, 3
#: The longest time in seconds from the beginning of a phase to the kill; the same with several ranks or a store; and
#: the longest time from the first kill to the next.
LONGEST, LONGEST_OF_MANY, APART = 0.012, 0.1, 0.1


def state(branch, step):
    """Return a state of several tensors, each of which shows its branch and step."""
    model = {f"w{index}": np.full(20_000, 1_000_000 * branch + step + index) for index in range(4)}
    return {"model": model, "branch": branch, "step": step}


def tell_of_copies(where, tell, before, after=None, *, branches=False):
    """Have copies report their beginning and their durability."""

    def telling(copy):
        def told(sources, target, **options):
            step = int(target.rpartition("-")[2])
            tell(before, NOTHING)
            copied = copy(sources, target, **options)
            if after is not None:
                # By now, the source may be another save of the same step.
                tell(after, (branch_of(target) if branches else 0, step))
            return copied

        return told

    points.replace(where, telling)


def branch_of(path):
    """Return the branch of a checkpoint."""
    with fastckpt.open(path) as checkpoint:
        return checkpoint.structure["branch"]


class Plan(NamedTuple):
    """The work of a child in a round.

    Attributes:
        number: the number of the round.
        keep: the number of checkpoints that its policy keeps.
        asynchronous: whether it saves in the background.
        fresh: whether nothing was ever acknowledged; traces of a killed upload may then prevent a new run.
        back: draws the older step to which the child goes back, and how; None if it does not go back.
        preempted: whether it saves on SIGTERM.
        alone: whether it is the only rank.
    """

    number: int
    keep: int
    asynchronous: bool
    fresh: bool
    back: random.Random | None
    preempted: bool
    alone: bool


def train(directory, remote, tell, plan):
    """Restore, perhaps go back, and save and remove endlessly or until a preemption."""

    def telling(clear):
        return lambda tier, durable: (tell("retention", NOTHING), clear(tier, durable))[1]

    points.replace(points.RETENTION, telling)
    discarded, telling = [], threading.Lock()

    def tell_unless_discarded(kind, place):
        # A copy may become durable while all newer checkpoints are about to be removed.
        with telling:
            if not discarded or place <= discarded[0]:
                tell(kind, place)

    tell_of_copies(points.DRAIN, tell_unless_discarded, "drain", "drained", branches=plan.alone)
    tell_of_copies(points.FETCH, tell, "fetch")
    options = {"files": fastckpt.Files(shard_size=160_000)}
    how = {"keep": plan.keep, "async_save": plan.asynchronous, "save_options": options}
    if remote is not None:
        how |= {"remote": remote, "remote_keep": 1 if "://" in remote else 2}
    run = Manager(directory, **how)
    if plan.preempted:
        run.save_on_signal(signal.SIGTERM, grace="60s")
    tell("restore", NOTHING)
    found = run.restore(fresh=plan.fresh)
    step = found.step if found else 0
    if plan.back is not None:
        tell("rollback", NOTHING)
        older = [one for one in run._catalogue.own(run._catalogue.entries(run.steps())) if one < step]
        if older:
            found = run.restore(step=plan.back.choice(sorted(older)))
            if plan.back.random() < 0.5:
                with telling:
                    discarded.append(place_of(found))
                    tell("discard", discarded[0])
                found = run.restore(step=found.step, discard_newer=True)
                discarded.clear()
            step = found.step
    try:
        while True:
            step += 1
            tell("save", NOTHING)
            run.save(step, state(plan.number, step))
            if step % 2:
                run._saves.pending and run._saves.pending.result()
                tell("acknowledged", (plan.number, step))
    except SystemExit:
        tell("acknowledged", (plan.number, step))


def place_of(found):
    """Return the branch and the step of the restored checkpoint."""
    return found.state["branch"], found.step


def check(directory, remote, acknowledged, drained):
    """Restore; return the fault, or an empty string."""
    warnings.simplefilter("error")
    wrong = wrong_with(directory, acknowledged, {} if remote is None else {"remote": remote})
    if remote is not None and not wrong:
        # The remote tier is restored alone, as on a node with an empty disk.
        wrong = wrong_with(f"{directory}-none", drained, {"remote": remote})
        wrong = wrong and f"{remote}: {wrong}"
    return wrong


def wrong_with(directory, least, far):
    """Restore from a run that must have ``least``, a step of a branch, or something later."""
    found = Manager(directory, read_only=True, **far).restore(fresh=least == NOTHING)
    if found is None:
        return "" if least == NOTHING else f"step {least} was acknowledged, and nothing is there"
    place = place_of(found)
    if place < least:
        return f"step {least} was acknowledged, and {place} is restored"
    expected = state(*place)
    if found.state["step"] != found.step or any(
        not np.array_equal(found.state["model"][name], value) for name, value in expected["model"].items()
    ):
        return f"step {place} is not what was saved"
    # Leftovers of small files may stay for a minute before a sweep removes them.
    for each in filter(os.path.isdir, [directory, *far.values()]):
        entries = [name for name in os.listdir(each) if not name.endswith(".new")]  # noqa: PTH208 - names are enough
        if far:
            # Many steps may wait for a slow remote tier, so only hidden entries count.
            entries = [name for name in entries if name.startswith(".")]
        if len(entries) >= 20:
            return f"leftovers pile up: {entries}"
    return ""


def in_children(work, count=1):
    """Fork ``count`` times; each child does ``work`` and ends. Return their pids, and the pipe of their messages."""
    reading, writing = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 1
        try:
            os.close(reading)
            work(writing, number)
            status = 0
        except BaseException:  # noqa: BLE001 - it ends here whatever it is
            # With several ranks, a rank fails when it learns of the death of another, so its error is not printed.
            if count == 1:
                traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    return pids, reading


class Ranks:
    """The store in which the ranks of each round meet.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size):
        self.size = size
        self._rounds = 0
        if size > 1:
            # The parent imports torch, because that takes a second.
            from torch import distributed

            self._torch = distributed
            # The store runs in a child: a lock that one of its threads holds would stay locked in each fork.
            _, pipe = in_children(lambda writing, _: self._keep_store(writing))
            self._port = int.from_bytes(os.read(pipe, 4), "little")
            os.close(pipe)

    def _keep_store(self, writing):
        """Serve the store in which the ranks of all rounds meet, as long as the parent lives."""
        parent = os.getppid()
        store = self._torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, store.port.to_bytes(4, "little"))
        while os.getppid() == parent:
            time.sleep(0.5)

    def meet(self, rank):
        """Join the group of this round."""
        if self.size > 1:
            store = self._torch.TCPStore("127.0.0.1", self._port, is_master=False)
            store = self._torch.PrefixStore(f"round {self._rounds}", store)
            self._torch.init_process_group("gloo", store=store, rank=rank, world_size=self.size)

    def kill(self, pids, seed, how):
        """Kill all ranks, or signal one rank to end."""
        self._rounds += 1
        seed.shuffle(pids)
        apart = seed.choice([0.0, 0.0, APART]) if self.size > 1 else 0.0
        for pid in pids:
            os.kill(pid, how)
            time.sleep(seed.uniform(0, apart))
        for pid in pids:
            os.waitpid(pid, 0)


def keep_bucket(writing):
    """Serve S3 with one empty bucket as long as the parent lives."""
    from harness.s3 import BUCKET, Server

    parent, server = os.getppid(), Server()
    server.client().create_bucket(Bucket=BUCKET)
    os.write(writing, server.url.encode())
    while os.getppid() == parent:
        # The requests are not needed here.
        server.forget()
        time.sleep(0.5)


def store():
    """Begin to serve S3, and set the environment variables for it; return the URL of the run."""
    from harness.s3 import BUCKET, environment

    _, pipe = in_children(lambda writing, _: keep_bucket(writing))
    os.environ.update(environment(os.read(pipe, 1000).decode()))
    os.close(pipe)
    return f"s3://{BUCKET}/run"


def one_round(number, directory, remote, known, left, phase, seed, ranks, *, sure=False):
    """Train and kill; put the newest acknowledged step and the newest drained step into ``known``.

    If a run was about to remove everything newer than a place, put the place and the round into ``left``. With
    ``sure``, kill only when ``known`` has a step of each kind, however slow the machine is.

    Returns:
        Whether the round ended with a preemption.
    """
    alone = ranks.size == 1
    plan = Plan(
        number=number,
        keep=seed.choice([1, 4]),
        asynchronous=seed.random() < 0.7,
        fresh=known == dict.fromkeys(known, NOTHING),
        back=random.Random(seed.random()) if alone and (seed.randrange(BACK) == 0 or phase == "rollback") else None,
        preempted=alone and seed.randrange(PREEMPTED) == 0,
        alone=alone,
    )
    after = seed.randrange(1, 4) if phase not in {"restore", "rollback", "fetch"} else 1
    delay = seed.uniform(0, LONGEST if alone and "://" not in (remote or "") else LONGEST_OF_MANY)

    def work(writing, rank):
        ranks.meet(rank)
        train(
            directory,
            remote,
            lambda kind, place: os.write(writing, MESSAGE.pack(KINDS.index(kind), *place)),
            plan,
        )

    pids, pipe = in_children(work, ranks.size)

    def heard():
        message = os.read(pipe, MESSAGE.size)
        if len(message) < MESSAGE.size:
            return None
        kind, *place = MESSAGE.unpack(message)
        place, kind = tuple(place), KINDS[kind]
        if kind in known and not any(back < place and place[0] < at for back, at in left):
            known[kind] = max(place, known[kind])
        elif kind == "discard":
            known.update({name: min(place, one) for name, one in known.items()})
            left.append((place, number))
        return kind

    try:
        while after > 0 or (sure and NOTHING in awaited(known, remote)):
            kind = heard()
            if kind is None:
                raise RuntimeError("the children ended by themselves")
            # If nothing can be fetched, a save ends the wait, and the check reports the loss.
            after -= kind == phase or (phase, kind) == ("fetch", "save")
        time.sleep(delay)
    finally:
        ranks.kill(pids, seed, signal.SIGTERM if plan.preempted else signal.SIGKILL)
    # Messages that the children sent before their death also count.
    while heard() is not None:
        pass
    os.close(pipe)
    return plan.preempted


def awaited(known, remote):
    """Return the steps that the run must have reported at the end of a campaign."""
    return [known["acknowledged"]] if remote is None else list(known.values())


def campaign(run, remote=None, size=1):
    """Make the trials of a :class:`faults.row.Run`, with ``size`` ranks.

    Args:
        run: the run, whose trials are the kills.
        remote: a URL of :func:`store`, or a directory.
        size: the number of ranks.
    """
    directory = str(run.place / "run")
    each = [phase for phase in PHASES if size == 1 or phase != "rollback"] + ["drain"] * (remote is not None)
    known = {"acknowledged": NOTHING, "drained": NOTHING}
    draw, ranks, phases, left = run.draw, Ranks(size), [], []
    for number in range(run.trials):
        # Each phase is drawn equally often, in any order.
        phases = phases or draw.sample(each, len(each))
        phase = phases.pop()
        lost = remote is not None and (draw.randrange(LOST) == 0 or number == run.trials - 1)
        if lost and known["drained"] != NOTHING:
            shutil.rmtree(directory, ignore_errors=True)
            known["acknowledged"], phase = known["drained"], "fetch"
        sure = number == run.trials - 2
        run.count("preempted", one_round(number + 1, directory, remote, known, left, phase, draw, ranks, sure=sure))
        run.count(phase)
        (pid,), pipe = in_children(
            lambda writing, _: os.write(writing, check(directory, remote, *known.values()).encode()),
        )
        with os.fdopen(pipe, encoding="utf-8") as file:
            wrong = file.read()
        if os.waitpid(pid, 0)[1] != 0:
            wrong = wrong or "the restore failed"
        run.done(wrong and f"seed {run.seed}, kill {number} within {phase}: {wrong}")
    if NOTHING in awaited(known, remote):
        raise AssertionError(f"no kill had anything to lose: {known}")
