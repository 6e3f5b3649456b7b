"""While processes really save, the table, JSON, --check, the screen and the save's own report agree."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastckpt_top import jsonout, lines, prometheus, text
from fastckpt_top.feed import ShmFeed
from fastckpt_top.lines import LineWriter
from fastckpt_top.model import Model
from fastckpt_top.targets import named
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.state import Ui
from looking import eventually
from prometheus_client.parser import text_string_to_metric_families

from harness import mounts, needs

MB = 10**6
ROOT = Path(__file__).parents[2]
SIZES = [(200, 60), (120, 30), (80, 24)]

# Reads commands, one JSON object per line, saves, and prints the save's report.
PROGRAM = """
import json, sys
import numpy as np
import fastckpt
weights = np.ones(120_000_000, np.uint8)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    try:
        io = fastckpt.IO(bandwidth_limit=order.pop("limit"))
        report = fastckpt.save({"weights": weights[: order.pop("size")]}, io=io, **order)
        told = {"bytes": report.bytes, "least": report.phases["write"] + report.phases["fsync"]}
    except OSError as error:
        told = {"errno": error.errno}
    print(json.dumps(told), flush=True)
"""


class Trainer:
    """A rank that saves."""

    def __init__(self, place, rank, job, wrap):
        environment = {
            **os.environ, "FASTCKPT_TOP_DIR": str(place), "FASTCKPT_JOB": job, "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT / "tests"),
        }  # fmt: skip
        environment |= {"TORCHELASTIC_RUN_ID": job, "MASTER_ADDR": job, "MASTER_PORT": "1"}
        command = [*wrap, sys.executable, "-c", PROGRAM]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def told(self):
        return json.loads(self.child.stdout.readline())

    def save(self, path, size, rate=0, step=None):
        """Begin a save; `told` waits for the save to end."""
        order = {"path": str(path), "size": size, "limit": rate or None}
        order["metadata"] = {} if step is None else {"step": step}
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()

    def save_for_long(self, path, step=None):
        """Begin a save that takes a minute: the test kills it earlier."""
        self.save(path, 120 * MB, 2 * MB, step)

    def end(self):
        self.child.kill()
        self.child.wait()


@pytest.fixture
def train(place):
    """Starts the ranks of a job, and kills them at the end."""
    children = []

    def start(count, job="gpt", wrap=()):
        made = [Trainer(place, rank, job, wrap) for rank in range(count)]
        children.extend(made)
        assert [one.told() for one in made] == ["ready"] * count
        return made

    yield start
    for one in children:
        one.end()
        one.child.stdin.close()
        one.child.stdout.close()


class Monitor:
    """A monitor that looks at the processes in a directory."""

    def __init__(self, place, target):
        self.feed = ShmFeed([str(place)])
        self.model = Model(named(target, target, "option"))
        self.ticks, self.lines = jsonout.Ticks(), io.StringIO()
        self._writer = LineWriter(self.lines)

    def look(self):
        """Look once, and check that all outputs agree."""
        self.model.update(self.feed.poll())
        self._writer.write(self.model)
        self.agree()
        return self.model

    def until(self, probe):
        """Look until `probe` returns a true value for the model."""

        def found():
            time.sleep(0.2)
            return probe(self.look())

        assert eventually(found), lines.table(self.model)
        return self.model

    def agree(self):
        model = self.model
        tick, table, (good, checked) = self.ticks.next(model), lines.table(model), lines.check(model, 100)
        for op, told in zip(model.ops, tick["ops"], strict=True):
            done, total = text.size(told["done"]), text.size(told["bytes"])
            rates = " of ".join(text.rates(told["avg_Bps"], told["target_Bps"]))
            share = text.percent(None if told["avg_Bps"] is None else told["avg_Bps"] / told["target_Bps"])
            block = table.partition(f"\njob {op.job_key} ")[2].partition("\njob ")[0] or table
            begin = f"{op.kind} {op.label}: {done} of {total} GB, {op.phase} "
            (line,) = [one for one in block.splitlines() if one.startswith(begin)]
            assert f"average {rates} GB/s ({share})" in line
            assert line.partition("): ")[2].partition(",")[0] == (told["verdict"] or "-")
            main = next(job for job in model.jobs if job.key == op.job_key)
            if told["running"] or not main.active:
                state = "running" if op.running else op.phase
                words = f" {op.kind} {op.label} ({state}): {rates} GB/s, {share} "
                judged = next((one for one in checked.splitlines() if words in one), "")
                assert f" x {text.count(told['gpus'], 'GPU')}" in judged
                met = told["failed"] == 0 and told["verdict"] == "ok"
                if told["verdict"] is not None:  # in a save's first second, only --check judges it
                    assert judged.startswith("ok: ") == met
                    assert met or good is False
            said = told["sentence"]
            if said is not None:
                mark = {"info": "-", "warn": "!", "bad": "x"}[said["level"]]
                assert f"\n{mark} {said['text']}\n" in block
            if op is next(one for one in model.ops if one.job_key == op.job_key):
                self._on_screen(op, told, rates, share)
        levels = {
            (sample.labels["job_name"], sample.labels["level"])
            for family in text_string_to_metric_families(prometheus.render(model))
            for sample in family.samples
            if sample.name == "fastckpt_job_level" and sample.value
        }
        said = {(job["name"], job["sentence"]["level"]) for job in tick["jobs"] if job["sentence"]}
        assert levels == said or len({job["name"] for job in tick["jobs"]}) < len(tick["jobs"])

    def _on_screen(self, op, told, rates, share):
        """Check the operation at the top of a job's screen."""
        for size in SIZES:
            ui = Ui()
            ui.job = op.job_key
            shown = paint(Frame(self.model, ui, text.UNICODE, *size)).plain
            top = " ".join(shown.split("\n")[1:5])
            assert re.search(rf"{rates.replace(' of ', ' of +')} GB/s +{share} ", top), (rates, share, shown)
            assert f"{text.size(told['done'])}/{text.size(told['bytes'] or None)} GB" in top
            assert f"{text.percent(told['progress'])} " in top
            mine = [one for one in self.model.ops if one.job_key == op.job_key]
            said = [one.sentence for one in mine if one.sentence and (one.running or not op.running)]
            assert not said or any(words in shown for one in said for words in one.words), (said, shown)


def reported(ranks, began):
    """The reports of ranks that began to save at the time `began`, and the seconds since then."""
    return [rank.told() for rank in ranks], time.monotonic() - began


def possible(average, reports, waited):
    """Whether `average` is possible for ranks with these reports, for which the test waited `waited` seconds.

    On a busy machine, ranks may begin one after the other, and reports may arrive late. So their save took at least as
    long as the slowest rank wrote, and at most as long as the test waited.
    """
    whole = sum(one["bytes"] for one in reports)
    return whole / waited <= average <= 1.001 * whole / max(one["least"] for one in reports)  # bytes without headers


def test_attached_late_to_a_limited_save(train, place, tmp_path, top):
    """Two saves have the same label, as `last` without a step: an ended save is no part of a running one."""
    ranks = train(2)
    watched = Monitor(place, 40 * MB)
    for rate in (0, 20 * MB):
        began, real = time.monotonic(), time.time()
        for number, rank in enumerate(ranks):
            rank.save(tmp_path / str(number) / "last", 24 * MB, rate)
        watched.until(lambda model: model.main is not None)
        reports, waited = reported(ranks, began)
    for monitor in (watched, Monitor(place, 40 * MB)):
        model = monitor.look()
        assert not model.main.running
        assert possible(model.main.average, reports, waited)
        assert model.main.done == pytest.approx(sum(one["bytes"] for one in reports), rel=0.001), "with headers"
        assert model.past.checkpoints[-1].average == pytest.approx(model.main.average, rel=0.001)
        assert len(model.past.checkpoints) == 2
    # After the saves, the real commands agree with this model.
    asked = ["--target", "0.04GB/s"]
    table, checked, told = (top(*words, *asked) for words in (["--once"], ["--check"], ["--once", "--json"]))
    assert [line for line in table.stdout.splitlines() if "last" in line] == [
        line for line in lines.table(model).splitlines() if "last" in line
    ]
    assert checked.stdout.strip() == lines.check(model, 100)[1]
    (op,) = json.loads(told.stdout.splitlines()[-1])["ops"]
    ours = jsonout.Ticks().next(model)["ops"][0]
    assert {**op, "peak_Bps": 0, "t_start": 0} == {**ours, "peak_Bps": 0, "t_start": 0}
    assert real - 0.001 < op["t_start"] < time.time()

    for number, rank in enumerate(ranks):
        rank.save_for_long(tmp_path / str(number) / "last")
    for monitor in (watched, Monitor(place, 40 * MB)):
        # The limit is known when both ranks have begun, and have waited for a second.
        model = monitor.until(lambda model: model.main.elapsed_s > 1.3 and "held at" in str(model.main.sentence))
        assert [(op.ranks, op.gpus, op.running) for op in model.ops] == [(2, 2, True), (2, 2, False)]
        assert model.main.total == pytest.approx(240 * MB, rel=0.01)
        now, target = text.rates(model.main.rate, 80 * MB)
        assert model.main.sentence.words[0] == f"held at {now} of {target} GB/s by bandwidth_limit"
        assert model.main.average < 9 * MB
    # In the second between two looks, the ranks may have waited only for a busy disk.
    checked = eventually(lambda: done if "; held at" in (done := top("--check", *asked)).stdout else None)
    assert checked.returncode == 1
    assert checked.stdout.startswith("BELOW TARGET: save last (running): ")
    assert "target custom x 2 GPUs; held at 0.0" in checked.stdout
    table = top("--once", *asked)
    assert table.returncode == 0
    assert "2 of 2 processes alive" in table.stdout


def test_two_jobs_of_which_one_fell_back(train, place, tmp_path):
    (one,) = train(1, "gpt")
    (other,) = train(1, "bert", wrap=[sys.executable, "-m", "harness.seccomp", "EPERM", "--"])
    ranks = {"gpt": one, "bert": other}
    monitor = Monitor(place, 3 * MB)
    began = time.monotonic()
    for name, rank in ranks.items():
        rank.save(tmp_path / name / "step-1", 24 * MB, 20 * MB, 1)
    reports = {name: reported([rank], began) for name, rank in ranks.items()}
    model = monitor.look()
    assert {op.job_key for op in model.ops} == {job.key for job in model.jobs}
    for job in model.jobs:
        (op,) = [op for op in model.ops if op.job_key == job.key]
        assert (op.running, op.ranks, op.target) == (False, 1, 3 * MB)
        assert possible(op.average, *reports[job.name])
    assert lines.check(model, 100)[0] is True

    for name, rank in ranks.items():
        rank.save_for_long(tmp_path / name / "step-2", 2)
    model = monitor.until(lambda model: sum(op.running and op.elapsed_s > 2 for op in model.ops) == 2)
    running = [op for op in model.ops if op.running]
    assert [(op.ranks, op.gpus, op.target) for op in running] == [(1, 1, 3 * MB)] * 2
    assert [op.total for op in running] == [pytest.approx(120 * MB, rel=0.01)] * 2
    assert {job.name: job.alive for job in model.jobs} == {"gpt": 1, "bert": 1}
    fell = {row.job: row.fallback for row in model.rows}
    assert fell == {"gpt": "", "bert": "EPERM"}
    told = [event.text for event in model.events if " runs " in event.text]
    assert [re.sub("threads|buffered", "it", text)[:35] for text in told] == ["rank 0 runs it, not io_uring (EPERM"]
    assert re.search(r" (threads|buffered)(\+D)?! ", lines.table(model))


def test_stopped_then_killed_then_started_again_with_the_same_step(train, place, tmp_path):
    ranks = train(2)
    monitor = Monitor(place, 3 * MB)
    for number, rank in enumerate(ranks):
        rank.save_for_long(tmp_path / str(number) / "step-7", 7)
    monitor.until(lambda model: model.main is not None and model.main.done)
    ranks[1].child.send_signal(signal.SIGSTOP)
    model = monitor.until(lambda model: model.main.sentence is not None and model.main.sentence.level == "bad")
    words = model.main.sentence.words[0]
    assert re.fullmatch(r"rank 1 stopped \(SIGSTOP\) for \d+ s", words)
    assert [row.state for row in model.rows] == ["WRITE", "STALL"]
    assert f" x {words}\n" in monitor.lines.getvalue()
    ranks[1].child.send_signal(signal.SIGCONT)
    monitor.until(lambda model: model.main.sentence is None or model.main.sentence.level != "bad")
    ranks[1].end()
    model = monitor.until(lambda model: model.main.failed)
    assert model.main.sentence.words[0] == "rank 1 died: this checkpoint cannot be completed"
    assert (model.main.running, model.main.ranks, model.node.alive, model.node.ranks) == (True, 2, 1, 2)
    died = model.main.done
    ranks[0].end()
    model = monitor.until(lambda model: not model.main.running)
    assert model.main.sentence.words[0] == "rank 0, rank 1 died: this checkpoint was not completed"
    assert died <= model.main.done < model.main.total
    assert lines.check(model, 100)[0] is False

    again = train(2)
    began = time.monotonic()
    for number, rank in enumerate(again):
        rank.save(tmp_path / str(number) / "step-7", 24 * MB, 20 * MB, 7)
    reports, waited = reported(again, began)
    for late in (monitor, Monitor(place, 3 * MB)):
        model = late.look()
        assert (model.main.running, model.main.ranks, model.main.gpus, model.main.failed) == (False, 2, 2, 0)
        assert possible(model.main.average, reports, waited)
        assert [row.rank for row in model.rows] == [0, 1]
        assert (model.node.alive, model.node.ranks) == (2, 2)
        assert lines.check(model, 100)[0] is True
        assert [one.error for one in model.past.checkpoints] == ["rank 0, rank 1 died", ""]
    for number, rank in enumerate(again):
        rank.save_for_long(tmp_path / str(number) / "step-7", 7)
    for late in (monitor, Monitor(place, 3 * MB)):
        model = late.until(lambda model: model.main.running and len(model.rows) == 2)
        assert (model.main.ranks, model.main.failed, model.node.alive, model.node.ranks) == (2, 0, 2, 2)
        assert model.main.total == pytest.approx(240 * MB, rel=0.01)


@pytest.mark.root
def test_a_full_disk_between_two_looks(train, place):
    needs.root()
    with mounts.mount("tmpfs", size=24 * MB) as small:
        (rank,) = train(1)
        monitor = Monitor(place, MB)
        rank.save(small / "step-200", 16 * MB, step=200)
        assert rank.told()["bytes"] > 0
        monitor.look()
        assert monitor.model.main.sentence.level == "info"
        rank.save(small / "step-300", 16 * MB, step=300)
        assert rank.told() == {"errno": 28}
        model = monitor.look()
        assert model.main.sentence.words[0] == "ENOSPC in step-300: nothing was replaced"
        assert "rank 0 save failed: ENOSPC" in [event.text for event in model.events]
        late = Monitor(place, MB).look()
        assert late.main.sentence == model.main.sentence
        assert [one.error for one in late.past.checkpoints] == ["", "ENOSPC"]
        assert lines.check(late, 0)[0] is False
        rank.end()
