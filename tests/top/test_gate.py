"""The monitor as a gate and an alarm for real saves: verdicts, counts, and unknown results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from by_hand import GB, Rank, look, moving
from fastckpt_top import prometheus
from fastckpt_top.feed import ShmFeed
from fastckpt_top.lines import check
from fastckpt_top.model import GROUPS, Model
from fastckpt_top.rows import Verdict
from fastckpt_top.segment import Phase
from fastckpt_top.views import history
from looking import end, eventually, once
from painted import frame
from producer import Image
from prometheus_client.parser import text_string_to_metric_families

# Reads path, bandwidth limit (0: none), base (empty: none) and file size limit (0: none) of a save from each line.
SAVER = """
import json, resource, sys
import numpy as np
import fastckpt
state = {"weights": np.random.default_rng(0).integers(0, 256, int(sys.argv[1]), np.uint8)}
for line in sys.stdin:
    path, limit, base, room = json.loads(line)
    if room:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    print("begins", flush=True)
    try:
        report = fastckpt.save(state, path, io=fastckpt.IO(bandwidth_limit=limit or None), base=base or None)
    except OSError as error:
        print(type(error).__name__, flush=True)
    else:
        print(report.bytes, flush=True)
"""
SLOW = 20_000
"""The bytes/s at which a save of 4 MB lasts longer than any test looks at it."""


class Saver:
    """A process that saves on command."""

    def __init__(self, place, job, launch, rank=None, size=4_000_000, world=0):
        environment = os.environ | {"FASTCKPT_TOP_DIR": str(place), "FASTCKPT_JOB": job}
        environment |= {"SLURM_JOB_ID": str(launch), "SLURM_STEP_ID": "0"}
        environment |= {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment |= {"WORLD_SIZE": str(world)} if world else {}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SAVER, str(size)]
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def begin(self, path, limit=0, base="", room=0):
        self.child.stdin.write(json.dumps([str(path), limit, str(base), room]) + "\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline() == "begins\n"
        return self

    def save(self, path, **options):
        """Save, and return the line that the process prints at the end."""
        return self.begin(path, **options).child.stdout.readline().strip()

    def over(self):
        """Close the input, and wait until the process exits."""
        self.child.stdin.close()
        assert self.child.wait() == 0

    def killed(self):
        self.child.kill()
        self.child.wait()


@pytest.fixture
def saver(place):
    """Starts processes that save, and kills them at the end."""
    started = []

    def start(*args, **options):
        started.append(Saver(place, *args, **options))
        return started[-1]

    yield start
    end([one.child for one in started])


def at_work(place, one):
    """Wait until a process writes."""
    pid = one.child.pid
    assert eventually(lambda: (pid, "write") in [(rank["pid"], rank["state"]) for rank in once(place)["ranks"]])


def died(place, one, path):
    """Let a process begin to save to `path`, and kill it while it writes."""
    one.begin(path, limit=SLOW)
    at_work(place, one)
    one.killed()


def series(page, name):
    """The job, the rank and the value of each sample of a metric."""
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sorted((sample.labels["job_name"], sample.labels["rank"], sample.value) for sample in samples)


def test_the_dead_of_another_launch_hide_no_job_and_are_named_where_the_others_are_judged(saver, place, top, tmp_path):
    """Mutants: `--check` judges only the last job; it does not mention the dead."""
    died(place, saver("died", 1), tmp_path / "d")
    for launch, job in ((2, "first"), (3, "second")):
        one = saver(job, launch)
        one.save(tmp_path / job)
        one.over()
    judged = top("--check", "0")
    *jobs, last = judged.stdout.splitlines()
    assert (judged.returncode, [line.split(":")[:2] for line in jobs]) == (0, [["ok", " second"], ["ok", " first"]])
    assert last.startswith("- 1 process of another launch died before that: `debug ls` names them, `debug clean --yes`")
    shown = top("--once").stdout
    assert [line.split(":")[0] for line in shown.splitlines() if line.startswith("job ")] == ["job second", "job first"]
    assert shown.splitlines()[-1] == last
    # The job of the process that died last is judged like the others.
    died(place, saver("late", 4), tmp_path / "l")
    judged = top("--check", "0")
    assert judged.returncode == 1
    words = [line.split(":")[:2] for line in judged.stdout.splitlines()[:-1]]
    assert words == [["FAILED", " late"], ["ok", " second"], ["ok", " first"]]


def test_each_of_many_jobs_that_ended_is_judged(place, top):
    """Mutant: `--check` judges only the GROUPS newest operations."""
    count = GROUPS + 4
    for number in range(count):
        made = Image(job=b"job-%d" % number, pid=100 + number, launch=1 + number)
        now = made.get("header", 0, "mono0_ns") - number * 10**9
        made.operation(phase=6, t_start_mono_ns=now - 10**9, t_end_mono_ns=now, bytes_total=10**9, bytes_durable=10**9)
        made.write(place, f"{100 + number}-1.seg")
    judged = top("--check", "0")
    words = [line.split(" ")[1] for line in judged.stdout.splitlines()]
    assert (judged.returncode, words) == (0, [f"job-{number}:{100 + number}" for number in range(count)])


def test_a_job_that_ended_keeps_its_place_while_another_one_saves_often(saver, place, tmp_path):
    """The model forgets a living process's old saves. Mutants: these push out the ended job's; all stay."""
    ended, living = saver("ended", 1), saver("living", 2)
    model, feed = Model(), ShmFeed([str(place)])
    model.update(feed.poll())
    ended.save(tmp_path / "e")
    ended.over()
    for number in range(GROUPS + 4):
        living.save(tmp_path / "l", base=tmp_path / "l" if number else "")
        model.update(feed.poll())
    feed.close()
    assert [job.name for job in model.jobs] == ["living", "ended"]
    assert [op.label for op in model.ops] == ["l", "e"]
    assert len(model._groups) == GROUPS + 1
    assert check(model, 0)[0] is True


def test_two_jobs_that_end_well_before_ones_eyes_are_both_judged(saver, place, tmp_path):
    """Mutant: while the ended processes are still shown, the first job counts as dead."""
    model, feed = Model(), ShmFeed([str(place)])
    for launch, job in ((1, "first"), (2, "second")):
        one = saver(job, launch)
        one.save(tmp_path / job)
        model.update(feed.poll())
        one.over()
    eventually(lambda: model.update(feed.poll()) or not model.node.alive)
    feed.close()
    assert [job.name for job in model.jobs] == ["second", "first"]
    assert model.others == 0
    good, words = check(model, 0)
    assert (good, [line.split(" ")[0] for line in words.splitlines()]) == (True, ["ok:", "ok:"])


def test_a_save_that_linked_all_has_no_verdict(saver, place, top, tmp_path):
    """Mutants: `--check`, the sentence or the history calls such a save slow; linked bytes are not shown."""
    one = saver("frozen", 1, size=30_000_000)
    written = [one.save(tmp_path / str(step), base=tmp_path / str(step - 1) if step else "") for step in range(4)]
    assert written[-1] == "0"
    judged = top("--check")
    assert (judged.returncode, judged.stdout) == (0, "ok: save 3 (done): nothing to write, 0.03 GB linked\n")
    shown = top("--once").stdout
    assert "save 3: nothing to write, 0.03 GB linked, done in " in shown
    assert "\n- 3: nothing to write, 0.03 GB linked\n" in shown
    assert "nothing to write, 0.03 GB linked" in top("--count", 1).stdout
    (op,) = once(place)["ops"]
    assert op["linked"] == 30_000_000
    assert (op["verdict"], op["sentence"]) == (None, {"level": "info", "text": "3: nothing to write, 0.03 GB linked"})
    model, feed = Model(), ShmFeed([str(place)])
    model.update(feed.poll())
    feed.close()
    assert (model.main.verdict, model.past.checkpoints[-1].label) == (Verdict.QUIET, "3")
    painted = frame()
    line = history.line(painted, model.past.checkpoints[-1], history.columns(80))
    assert line.plain.startswith(painted.glyphs.quiet)
    assert "%" not in line.plain


def test_what_had_nothing_to_write_is_told_as_an_event():
    model, rank = Model(), Rank(0)
    look(model, 1.0, rank.op(0, total=0, start=0.5))
    look(model, 2.0, rank.op(0, Phase.DONE, total=0, start=0.5, end=1.5))
    assert [event.text for event in model.events][-1] == "save step-1 done in 1.0 s: nothing to write"
    # If another rank writes, the save has something to write.
    look(model, 3.0, rank, Rank(1).op(GB, Phase.DONE, total=GB, start=0.5, end=1.5))
    assert not model.main.empty


@pytest.mark.parametrize("before", [False, True])
def test_a_failed_save_says_what_is_true_whether_or_not_there_was_another(saver, place, top, tmp_path, before):
    """Mutant: a failed first save reports that the old checkpoint is unchanged."""
    one = saver("full", 1)
    if before:
        one.save(tmp_path / "c")
    assert one.save(tmp_path / "c", room=1_000_000) == "OSError"
    judged = top("--check")
    assert judged.returncode == 1
    assert judged.stdout.endswith("; EFBIG in c: nothing was replaced\n")
    assert (tmp_path / "c").exists() == before


def test_where_another_ranks_own_save_went_well_something_was_replaced():
    """Each rank has its own checkpoint. Mutant: "nothing was replaced", though another rank's save succeeded."""
    ranks = [Rank(0).op(GB), Rank(1).op(0, Phase.FAILED, end=1.0, error=28)]
    model = look(Model(), 2.0, *ranks)
    assert model.main.sentence.words[0] == "rank 1: ENOSPC in step-1: nothing was replaced"
    look(model, 3.0, ranks[0].op(10 * GB, Phase.DONE, end=2.5), ranks[1])
    assert model.main.sentence.words[0] == "rank 1: ENOSPC in step-1"


def test_the_series_of_deaths_counts_who_died_and_nobody_else(saver, place, top, tmp_path):
    """Mutants: `up` is 0 for ended ranks; a death without a rank does not count; a death outlives a restart."""
    page = tmp_path / "x.prom"

    def metrics(name):
        assert top("--once", "-d", "0.1", "--prometheus", page).returncode == 0
        return series(page.read_text(), f"fastckpt_process_{name}")

    well, dead, alone = saver("job", 1, rank=0), saver("job", 1, rank=1), saver("alone", 2)
    well.save(tmp_path / "0" / "a")
    well.over()
    assert (metrics("up"), metrics("died")) == ([], [("job", "0", 0)])
    dead.begin(tmp_path / "1" / "b", limit=SLOW)
    at_work(place, dead)
    assert (metrics("up"), metrics("died")) == ([("job", "1", 1)], [("job", "0", 0), ("job", "1", 0)])
    dead.killed()
    assert (metrics("up"), metrics("died")) == ([], [("job", "0", 0), ("job", "1", 1)])
    died(place, alone, tmp_path / "c")
    assert metrics("died") == [("alone", "", 1), ("job", "0", 0), ("job", "1", 1)]
    again = saver("job", 3, rank=1)
    again.save(tmp_path / "1" / "b")
    assert metrics("up") == [("job", "1", 1)]
    assert ("job", "1", 0) in metrics("died")


def test_two_processes_without_a_rank_that_died_are_two_series():
    ranks = [Rank(0).of(rank=-1, pid=100 + index, job="a", launch=1, gpu=-1) for index in range(3)]
    model = look(Model(), 1.0, *(rank.op(GB) for rank in ranks))
    for rank in ranks[:2]:
        rank.proc = replace(rank.proc, alive=False)
    look(model, 2.0, *ranks)
    assert series(prometheus.render(model), "fastckpt_process_died") == [("a", "", 0), ("a", "", 1), ("a", "", 1)]


def test_the_last_rank_of_a_save_is_named_with_its_own_limit_and_the_others_stay(saver, place, top, tmp_path):
    """Two ranks exit before the monitor starts. Mutants: all ranks share the limit; ranks that are done vanish."""
    ranks = [saver("job", 1, rank=rank) for rank in range(3)]
    ranks[2].begin(tmp_path / "2" / "last", limit=SLOW)
    for one in ranks[:2]:
        one.save(tmp_path / str(one.child.pid) / "last")
        one.over()
    tick = eventually(lambda: tick if "bandwidth_limit" in str((tick := once(place))["ops"][0]["sentence"]) else None)
    assert [(rank["rank"], rank["state"], rank["alive"]) for rank in tick["ranks"]] == [
        (0, "done", False),
        (1, "done", False),
        (2, "write", True),
    ]
    (op,) = tick["ops"]
    assert (op["running"], op["ranks"]) == (True, 3)
    assert op["sentence"]["text"].startswith("only rank 2 is left: ")
    assert op["sentence"]["text"].endswith(" GB/s, its own bandwidth_limit")
    assert "only rank 2 is left" in top("--check").stdout


def test_a_rank_that_has_not_begun_is_named_and_the_target_counts_it(saver, place, top, tmp_path):
    """Mutants: the target shrinks; the total lacks the rank's bytes; the rank is not named; it stays missing."""
    ranks = {rank: saver("job", 1, rank=rank, world=4) for rank in range(4)}

    def begin(name, of, **options):
        for rank in of:
            ranks[rank].begin(tmp_path / str(rank) / name, **options)

    def told(words):
        return eventually(lambda: op if words in str((op := once(place)["ops"][0])["sentence"]) else None)

    begin("slow", (0, 2, 3), limit=SLOW)
    op = told("3 of 4 ranks are here; rank 1 has not begun")
    assert (op["ranks"], op["missing"], op["gpus"], op["target_Bps"]) == (3, [1], 4, 4 * 0.75e9)
    assert op["sentence"]["level"] == "warn"
    assert (op["eta_s"], op["progress"] < 0.75) == (None, True)
    assert "3 of 4 ranks are here; rank 1 has not begun" in top("--check").stdout
    assert ", target light x 4 GPUs" in top("--check").stdout
    begin("slow", (1,), limit=SLOW)
    op = eventually(lambda: op if not (op := once(place)["ops"][0])["missing"] else None)
    assert (op["ranks"], op["gpus"]) == (4, 4)
    assert "begun" not in str(op["sentence"])
    for one in ranks.values():
        one.killed()
    ranks = {rank: saver("again", 2, rank=rank, world=4) for rank in (0, 2, 3)}
    for rank, one in ranks.items():
        one.save(tmp_path / str(rank) / "done")
        one.over()
    op = once(place)["ops"][0]
    assert (op["missing"], op["gpus"], op["phase"], op["progress"]) == ([1], 4, "done", 0.75)
    assert op["sentence"] == {"level": "warn", "text": "done: 3 of 4 ranks took part; rank 1 did not"}
    page = tmp_path / "x.prom"
    assert top("--once", "-d", "0.1", "--prometheus", page).returncode == 0
    families = text_string_to_metric_families(page.read_text())
    target = [one for family in families for one in family.samples if one.name == "fastckpt_target_bytes_per_second"]
    assert {one.value for one in target if one.labels["op"] == "save"} == {4 * 0.75e9}


def test_ranks_are_missed_only_where_the_others_show_that_they_are_to_come():
    """Rank 0 alone may save for all. Mutants: the monitor expects all ranks of the machine, or of all machines."""

    def missing(*ranks, group=0, local=4, world=4):
        procs = [Rank(rank).of(local_rank=rank % local, local_world=local, world=world) for rank in ranks]
        for one in procs:
            one.op(GB)
            block = replace(one.proc.process, group=group, group_size=world, group_rank=one.proc.header.rank)
            one.proc = replace(one.proc, process=block)
        return look(Model(), 2.0, *procs).main.missing

    assert missing(0) == missing(0, 1) == ()
    assert missing(0, 1, 3) == (2,)
    assert missing(0, group=5) == (1, 2, 3)
    assert missing(4, 5, 7, local=4, world=8) == (6,)
    assert missing(0, 1, 2, local=-1) == ()


def test_who_is_left_is_what_held_a_save_back():
    """Mutant: bandwidth_limit held the whole save back."""
    model, ranks = Model(), [Rank(0), Rank(1)]
    for tick in range(1, 21):
        now = tick / 2
        moving(ranks[1], now, GB / 10, "limit", total=2 * GB)
        if now > 1:
            ranks[0].op(2 * GB, Phase.DONE, total=2 * GB, end=1.0)
        else:
            moving(ranks[0], now, 2 * GB, total=2 * GB)
        look(model, now, *ranks)
    assert [row.state for row in model.rows] == ["DONE", "WRITE"]
    look(model, 20.5, ranks[0], ranks[1].op(2 * GB, Phase.DONE, total=2 * GB, end=20.0))
    assert model.main.sentence.words[0].endswith(", held back by rank 1")
