"""Drawn histories: wherever the monitor attaches, its output agrees with a plain list of the events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from fastckpt_top import demo, jsonout, lines, prometheus, text
from fastckpt_top.model import Model
from fastckpt_top.rows import Verdict
from fastckpt_top.segment import Phase
from fastckpt_top.snapshot import Snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

MB = 10**6
REAL = 1e9
BASE = demo.DemoSource(lambda: 0.0, lambda: 0.0, 9.0).at(0.0).procs[0]
PAST = demo._past(0, 0)[0]


@dataclass
class Part:
    """One process's part in one operation."""

    op_id: int
    label: str
    step: int
    start: float
    end: float
    #: `done`, `failed` or `died`.
    fate: str
    total: int

    def done(self, now: float) -> int:
        whole = self.total if self.fate == "done" else self.total // 2
        return whole if now >= self.end else int(whole * (now - self.start) / (self.end - self.start))

    def running(self, now: float) -> bool:
        return self.start <= now < self.end


@dataclass
class Process:
    pid: int
    rank: int
    job: str
    launch: int
    group: int
    begin: float
    end: float = float("inf")
    parts: list[Part] = field(default_factory=list)

    def seen(self, now: float):
        """The process's segment at the time `now`."""
        alive = now < self.end
        begun = [part for part in self.parts if part.start <= now]
        operations, threads, history = [], [], []
        for part in begun[-2:]:
            over = now >= part.end and part.fate != "died"
            phase = (Phase.DONE if part.fate == "done" else Phase.FAILED) if over else Phase.WRITE
            operations.append(
                replace(
                    BASE.operations[0], op_id=part.op_id, phase=phase, kind=1, bytes_total=part.total, flags=0,
                    fallback_errno=0, target=0, error=5 if phase == Phase.FAILED else 0, label=part.label,
                    step=part.step, t_start_mono_ns=int(part.start * 1e9), t_phase_mono_ns=int(part.start * 1e9),
                    t_end_mono_ns=int(part.end * 1e9) if over else 0,
                )
            )  # fmt: skip
        if begun:
            part = begun[-1]
            moved = sum(one.done(now) for one in begun)
            threads.append(
                (
                    0,
                    replace(
                        BASE.threads[0][1], op_id=part.op_id, bytes_op=part.done(now), bytes_ever=moved,
                        requests=moved // MB, last_progress_mono_ns=int(min(now, part.end) * 1e9),
                    ),
                )
            )  # fmt: skip
        # A segment holds the last 64 records.
        for part in [one for one in begun[-64:] if now >= one.end and one.fate != "died"]:
            record = replace(
                PAST, op_id=part.op_id, kind=1, result=1 if part.fate == "done" else 2, bytes=part.done(now),
                t_start_real_ns=int((REAL + part.start) * 1e9), dur_ns=int((part.end - part.start) * 1e9),
                step=part.step, label=part.label, error=0 if part.fate == "done" else 5, flags=0,
            )  # fmt: skip
            history.append(record)
        moments = [at for part in begun for at in (part.start, part.end) if at <= now]
        header = replace(BASE.header, pid=self.pid, rank=self.rank, job=self.job, launch=self.launch, gpu=self.rank)
        process = replace(
            BASE.process, group=self.group, group_rank=self.rank, waits_for=0, target_save=0, target_load=0,
            heartbeat=int(min(now, self.end) * 10),
        )  # fmt: skip
        return replace(
            BASE, key=f"process-{self.pid}", path=f"/{self.pid}.seg", header=header, process=process,
            operations=tuple(operations), threads=tuple(threads), history=tuple(history), alive=alive,
            same_clock=True, touched=REAL + max(moments, default=self.begin),
        )  # fmt: skip


@dataclass
class World:
    processes: list[Process] = field(default_factory=list)
    #: The node's operations, each a list of processes and their parts.
    operations: list[list[tuple[Process, Part]]] = field(default_factory=list)
    end: float = 0.0

    def seen(self, now: float) -> Snapshot:
        there = tuple(process.seen(now) for process in self.processes if process.begin <= now)
        return Snapshot(now, REAL + now, "host", there)


SAVES = st.fixed_dictionaries(
    {
        "label": st.sampled_from(("last", "step-1", "step-2")),
        "gap": st.sampled_from((0.75, 3.0, 8.0)),
        "starts": st.tuples(*[st.sampled_from((0.0, 0.25, 1.0))] * 3),
        "lengths": st.tuples(*[st.sampled_from((0.25, 2.5, 6.0))] * 3),
        "fate": st.sampled_from(("done", "done", "done", "failed", "died")),
        "victim": st.integers(0, 2),
    }
)
LAUNCHES = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 3),
        "saves": st.lists(SAVES, min_size=1, max_size=3),
        "again": st.booleans(),
        "pause": st.sampled_from((0.75, 2.0, 9.0)),
    }
)
JOBS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("train", "train", "other")),
        "grouped": st.booleans(),
        "begin": st.sampled_from((10.0, 11.0, 17.0)),
        "launches": st.lists(LAUNCHES, min_size=1, max_size=2),
    }
)


def made(jobs) -> World:
    """The world of the drawn jobs, in which a launch ends with its first failure or its last save."""
    world = World()
    number = 0
    for job in jobs:
        now, same = job["begin"], False
        for launch in job["launches"]:
            number += not (same and launch["again"])
            same = False
            ranks = [
                Process(1000 - len(world.processes) - rank, rank, job["name"], number, 0, now)
                for rank in range(launch["ranks"])
            ]
            if job["grouped"]:
                for process in ranks:
                    process.group = ranks[0].pid
            world.processes += ranks
            for op_id, save in enumerate(launch["saves"], 1):
                now += save["gap"]
                starts = [now + save["starts"][process.rank] for process in ranks]
                ends = [start + save["lengths"][process.rank] for start, process in zip(starts, ranks, strict=True)]
                fates = ["done"] * len(ranks)
                if save["fate"] != "done":
                    victim = save["victim"] % len(ranks)
                    fates = ["failed"] * len(ranks)
                    fates[victim] = save["fate"]
                    # The failure happens after all ranks have begun; the others learn of it a little later.
                    ends[victim] = max(max(starts) + 0.125, ends[victim])
                    known = ends[victim] + 0.125
                    ends = [ends[victim] if rank == victim else known for rank in range(len(ranks))]
                step = int(save["label"][5:]) if save["label"] != "last" else -1
                parts = [
                    Part(op_id, save["label"], step, start, end, fate, (1 + process.rank) * 1000 * MB)
                    for process, start, end, fate in zip(ranks, starts, ends, fates, strict=True)
                ]
                for process, part in zip(ranks, parts, strict=True):
                    process.parts.append(part)
                world.operations.append(list(zip(ranks, parts, strict=True)))
                now = max(ends)
                if save["fate"] != "done":
                    for process, part in zip(ranks, parts, strict=True):
                        process.end = part.end if part.fate == "died" else now + 0.25
                    same = True
                    break
            if not same:
                for process in ranks:
                    process.end = now + 0.5
            now += launch["pause"]
        world.end = max(world.end, now)
    return world


def check_now(world: World, model: Model, now: float, attached: float) -> None:
    """Check the node and its running operations."""
    assert model.node.alive == sum(process.begin <= now < process.end for process in world.processes)
    wanted = []
    for operation in world.operations:
        begun = [part for _, part in operation if part.start <= now]
        if any(part.running(now) for part in begun):
            bad = sum(part.fate != "done" and part.end <= now for part in begun)
            done, elapsed = sum(part.done(now) for part in begun), now - min(part.start for part in begun)
            figures = (done, done / elapsed if done else 0.0)
            wanted.append((begun[0].label, len(begun), sum(part.total for part in begun), bad, *figures))
    shown = [(op.label, op.ranks, op.total, op.failed, op.done, op.average or 0.0) for op in model.ops if op.running]
    for one, other in zip(sorted(shown), sorted(wanted), strict=True):
        assert one == (*other[:-1], pytest.approx(other[-1])), (now, attached)


def check_jobs(world: World, model: Model, now: float) -> None:
    """Check that processes launched together are one job, and that all verdicts on an operation agree."""
    launch = {f"process-{process.pid}": process.launch for process in world.processes}
    there = {key: launch[key] for key in model.job_of}
    keys = {job: {model.job_of[key] for key in there if there[key] == job} for job in there.values()}
    assert all(len(one) == 1 for one in keys.values()), "a job has one key"
    assert len({one for (one,) in keys.values()}) == len(keys), "no two jobs have the same key"
    number = {key: job for job, (key,) in keys.items()}
    alive = [process.launch for process in world.processes if process.begin <= now < process.end]
    shown = {number[job.key]: job for job in model.jobs}
    assert set(alive) <= shown.keys()
    assert {one: job.alive for one, job in shown.items()} == {one: alive.count(one) for one in shown}
    assert {row.job_key for row in model.rows} <= {job.key for job in model.jobs}
    good = []
    for one in shown:
        mine = [
            begun for op in world.operations if (begun := [p for who, p in op if who.launch == one if p.start <= now])
        ]
        running = [parts for parts in mine if any(part.running(now) for part in parts)]
        last = sorted(mine, key=lambda parts: max(part.end for part in parts))[-1:]
        good += [all(part.fate == "done" or part.end > now for part in parts) for parts in running or last]
    assert lines.check(model, 0.0)[0] == (all(good) if good else None), now
    tick, table, page = jsonout.Ticks().next(model), lines.table(model), prometheus.render(model)
    assert [job["key"] for job in tick["jobs"]] == [job.key for job in model.jobs]
    for op, told in zip(model.ops, tick["ops"], strict=True):
        assert (told["job"], told["label"], told["done"], told["running"]) == (
            op.job_key,
            op.label,
            op.done,
            op.running,
        )
        said = op.sentence
        assert (told["sentence"] or {}).get("level") == (said.level if said else None)
        assert (said is not None and said.level == "bad") == (op.failed > 0)
        if said is not None:
            assert f" {said.words[0]}\n" in table
            assert text.width(said.words[-1]) <= 36
            if said.level != "bad":
                low = (Verdict.LOW, Verdict.BAD)
                behind = op.running and any(row.key == said.row and row.verdict in low for row in model.rows)
                assert (said.level == "warn") == (op.verdict in low or behind), said
    levels = [
        sample.labels["level"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "fastckpt_job_level" and sample.value
    ]
    said_of = [job.sentence.level for job in model.jobs if job.sentence]
    assert set(levels) <= set(said_of)
    if len({job.name for job in model.jobs}) == len(model.jobs):
        assert levels == said_of


def check_series(world: World, model: Model, now: float) -> None:
    """Check that a series belongs to the living process, not to an earlier one of its rank or another job's."""
    living = [process for process in world.processes if process.begin <= now < process.end]
    samples = [one for family in text_string_to_metric_families(prometheus.render(model)) for one in family.samples]
    moved = {
        (sample.labels["job_name"], sample.labels["rank"]): sample.value
        for sample in samples
        if sample.name == "fastckpt_io_bytes_total"
    }
    up = [int(sample.labels["pid"]) for sample in samples if sample.name == "fastckpt_process_up" and sample.value == 1]
    assert sorted(up) == sorted(process.pid for process in living)
    assert len(up) == sum(sample.name == "fastckpt_process_up" for sample in samples), "ended processes have no series"
    fallen = {one.pid for one in world.processes if one.end <= now and any(part.fate == "died" for part in one.parts)}
    for sample in samples:
        if sample.name == "fastckpt_process_died":
            assert sample.value == (int(sample.labels["pid"]) in fallen), (sample.labels, now)
    for process in living:
        alike = {other.launch for other in living if other.job == process.job}
        name = process.job if len(alike) == 1 else model.job_of[f"process-{process.pid}"]
        wanted = sum(part.done(now) for part in process.parts if part.start <= now)
        assert moved[name, str(process.rank)] == wanted, (process.pid, now)


def check_past(world: World, model: Model) -> None:
    """Check the history after the last event."""
    wanted = []
    for operation in world.operations:
        parts = [part for _, part in operation]
        recorded = sum(part.done(world.end) for part in parts if part.fate != "died")
        died = any(part.fate == "died" for part in parts)
        failed = any(part.fate == "failed" for part in parts)
        wanted.append((parts[0].label, len(parts), recorded, died, died or failed))
    shown = [
        (one.label, len(one.members), one.bytes, "died" in one.error, bool(one.error)) for one in model.past.checkpoints
    ]
    assert sorted(shown) == sorted(wanted)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(JOBS, min_size=1, max_size=2), st.integers(0, 40), st.sampled_from((0.5, 2.0)))
def test_what_is_shown_is_what_happened(jobs, late, interval):
    world = made(jobs)
    model = Model()
    now = attached = min(10.0625 + late, world.end + 1.0)
    while True:
        model.update(world.seen(now))
        check_now(world, model, now, attached)
        check_jobs(world, model, now)
        if int(now) % 5 == 0:
            check_series(world, model, now)
        if now >= world.end:
            break
        now += interval
    check_past(world, model)


def test_weeks_of_records_do_not_pile_up():
    """The monitor takes in each of a segment's 64 records once, and forgets records that have left the segment."""
    process = Process(1, 0, "train", 1, 0, 10.0)
    model, ticks, given = Model(), jsonout.Ticks(), []
    process.parts = [
        Part(number, f"step-{number}", number, 10.0 * number, 10.0 * number + 1, "done", MB) for number in range(1, 301)
    ]
    for number in range(1, 301):
        now = 10.0 * number + 2
        model.update(Snapshot(now, REAL + now, "host", (process.seen(now),)))
        given += [record[0] for proc in ticks.next(model)["procs"] for record in proc["history"]]
    assert given == list(range(1, 301))
    assert [one.step for one in model.past.checkpoints] == given
    assert max(map(len, (*model.past._seen.values(), *ticks._sent.history.values()))) <= 256


def start_of(*processes, end=30.0):
    """A world of these processes, which form one operation."""
    return World(list(processes), [[(process, process.parts[0]) for process in processes]], end)


def attended(world, moments):
    model = Model()
    for now in moments:
        model.update(world.seen(now))
    return model


def test_who_begins_while_another_dies_unseen_is_part_of_the_same_attempt():
    """A rank died at an unknown time between two looks, perhaps long after it moved its last byte."""
    dead = Process(11, 0, "train", 1, 0, 10.0, 14.0, [Part(1, "last", -1, 12.0, 14.0, "died", 9000 * MB)])
    late = Process(12, 1, "train", 1, 0, 10.0, parts=[Part(1, "last", -1, 13.5, 14.25, "failed", 9000 * MB)])
    world = start_of(dead, late)
    model = attended(world, (12.5, 13.0, 15.0, 15.5))
    assert [(op.ranks, op.failed) for op in model.ops] == [(2, 2)]
    check_past(world, model)


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("moments", [(12.5, 14.5, 15.5, 17.0, 18.5), (12.5, 18.5), (18.5,)])
def test_a_rank_that_died_and_was_started_again_at_once_has_two_attempts(moments, rank):
    """The same launcher starts it under the same name, and too soon for a pause to separate the attempts."""
    dead = Process(11, rank, "train", 1, 0, 10.0, 14.0, [Part(1, "last", -1, 12.0, 14.0, "died", 9000 * MB)])
    again = Process(12, rank, "train", 1, 0, 14.5, parts=[Part(1, "last", -1, 15.0, 18.0, "done", 9000 * MB)])
    world = start_of(dead, again)
    world.operations = [[(process, process.parts[0])] for process in (dead, again)]
    model = attended(world, moments)
    check_past(world, model)
    op = model.main
    assert (op.ranks, op.failed, op.done, op.average) == (1, 0, 9000 * MB, pytest.approx(3000 * MB))


def test_a_rank_that_begins_late_and_fails_is_in_the_checkpoint_of_its_operation():
    """The monitor saw it in the operation, after reading the records of the ranks that had ended."""
    first = Process(11, 0, "train", 1, 0, 10.0, parts=[Part(1, "last", -1, 12.0, 13.0, "done", MB)])
    late = Process(12, 1, "train", 1, 0, 10.0, parts=[Part(1, "last", -1, 15.0, 20.0, "failed", MB)])
    world = start_of(first, late)
    model = attended(world, (12.5, 14.0, 16.0, 21.0))
    assert [(op.ranks, op.failed) for op in model.ops] == [(2, 1)]
    check_past(world, model)
