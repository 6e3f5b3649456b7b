"""Drains, copies and fetches of real processes are operations, and show where the last step is safe."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from by_hand import GB, Rank, look
from fastckpt_top import jsonout, text
from fastckpt_top.feed import ShmFeed
from fastckpt_top.model import Model
from fastckpt_top.segment import FLAG_WHOLE, Kind, Phase
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.state import Ui
from looking import end, eventually, once
from prometheus_client.parser import text_string_to_metric_families

SIZE = 4_000_000

# Runs each input line as a statement, and prints `ok` or the exception's name. Exits when its input is closed.
PROGRAM = """
import sys
import numpy as np
import fastckpt
state = {"weights": np.arange(SIZE, dtype=np.uint8)}
for line in sys.stdin:
    try:
        exec(line)
    except Exception as error:
        print(type(error).__name__, flush=True)
    else:
        print("ok", flush=True)
"""


class Program:
    """A process that runs the statements it is sent."""

    def __init__(self, place, tmp_path):
        command = [sys.executable, "-c", PROGRAM.replace("SIZE", str(SIZE))]
        environment = os.environ | {"FASTCKPT_TOP_DIR": str(place), "FASTCKPT_JOB": "job"}
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tmp_path)

    def begin(self, statement):
        self.child.stdin.write(statement + "\n")
        self.child.stdin.flush()

    def said(self):
        return self.child.stdout.readline().strip()

    def do(self, statement, expected="ok"):
        self.begin(statement)
        assert self.said() == expected

    def manage(self, limit):
        how = f'remote="remote/run", remote_bandwidth_limit={limit}' if limit else 'remote="remote/run"'
        self.do(f'manager = fastckpt.Manager("run", {how})')


@pytest.fixture
def program(place, tmp_path):
    started = []

    def start():
        started.append(Program(place, tmp_path))
        return started[-1]

    yield start
    end([one.child for one in started])


def the(kind, tick):
    """The first operation of a kind in a tick, or None."""
    return next((op for op in tick["ops"] if op["op"] == kind), None)


def samples(page, name):
    families = text_string_to_metric_families(page.read_text())
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]


def test_a_drain_is_an_operation_and_says_where_the_last_step_is_safe(program, place, top, tmp_path):
    """Mutants: a drain is IDLE; the target judges a drain; a drain hides its save; a partial copy is safe."""
    one = program()
    one.manage(SIZE // 20)
    one.do("manager.save(7, state)")
    tick = eventually(lambda: tick if (the("drain", tick := once(place)) or {}).get("eta_s") else None)
    drain, save = the("drain", tick), the("save", tick)
    assert (drain["running"], drain["phase"], drain["label"], drain["step"]) == (True, "drain", save["label"], 7)
    assert SIZE <= drain["bytes"] < SIZE + 5000, "a drain also copies the files beside the shard"
    assert 0 < drain["done"] < drain["bytes"]
    assert (drain["verdict"], drain["target_Bps"], drain["missing"]) == (None, 0, [])
    assert 0 < drain["Bps"] < SIZE
    assert drain["sentence"]["text"].startswith(f"drain of {drain['label']}: 0.00 of 0.00 GB, ")
    (job,) = tick["jobs"]
    at = time.strftime("%H:%M:%S", time.localtime(job["safe"]["local"]["t"]))
    assert drain["sentence"]["text"].endswith(f"; last step safe at: local {at}, remote not yet")
    assert (job["safe"].keys(), job["safe"]["local"]["step"], job["active"]) == ({"local"}, 7, True)
    assert [(row["op"], row["state"]) for row in tick["ranks"]] == [("save", "done"), ("drain", "drain")]
    judged = top("--check", "0").stdout.splitlines()
    assert [line.split(": ")[:2] for line in judged] == [
        ["ok", f"drain {drain['label']} (running)"],
        ["ok", f"save {drain['label']} (done)"],
    ]
    page = tmp_path / "x.prom"
    assert top("--once", "-d", "0.5", "--prometheus", page).returncode == 0
    for name in ("size_bytes", "done_bytes", "bytes_per_second", "eta_seconds"):
        ((labels, value),) = samples(page, f"fastckpt_operation_{name}")
        assert (labels["op"], value > 0) == ("drain", True)
    assert [labels["place"] for labels, _ in samples(page, "fastckpt_last_safe_timestamp_seconds")] == ["local"]

    model, feed = Model(), ShmFeed([str(place)])
    eventually(lambda: model.update(feed.poll()) or (model.main and model.main.eta_s))
    feed.close()
    assert (model.main.kind, model.node.load_rate) == ("drain", 0.0)
    for size in ((120, 30), (80, 24)):
        shown = paint(Frame(model, Ui(), text.UNICODE, *size)).plain
        assert "DRAIN" in shown
        assert "remote not yet" in shown
        assert " OK" not in shown.splitlines()[2]
    assert "DRAIN" in paint(Frame(model, Ui(), text.UNICODE, 40, 8)).plain

    one.do("manager.wait()")
    tick = once(place)
    drain, save = the("drain", tick), the("save", tick)
    assert (drain["running"], drain["phase"], drain["done"]) == (False, "done", drain["bytes"])
    (job,) = tick["jobs"]
    ends = [time.strftime("%H:%M:%S", time.localtime(job["safe"][place]["t"])) for place in ("local", "remote")]
    assert job["safe"]["remote"]["step"] == 7
    for op in (drain, save):
        assert op["sentence"]["text"].endswith(f"last step safe at: local {ends[0]}, remote {ends[1]}")
    assert [row["op"] for row in tick["ranks"]] == ["save"], "after a drain, the row shows the save"
    assert top("--once", "-d", "0.1", "--prometheus", page).returncode == 0
    places = [labels["place"] for labels, _ in samples(page, "fastckpt_last_safe_timestamp_seconds")]
    assert sorted(places) == ["local", "remote"]
    ((_, copied),) = samples(page, "fastckpt_copied_bytes_total")
    assert copied == drain["bytes"]
    last = {labels["op"]: value for labels, value in samples(page, "fastckpt_last_operation_bytes")}
    assert last == {"save": save["bytes"], "drain": drain["bytes"]}


def test_the_next_save_is_not_yet_at_the_remote_and_what_is_there_is_the_one_before(program, place):
    one = program()
    one.manage(0)
    one.do("manager.save(1, state)")
    one.do("manager.wait()")
    one.do(f'manager = fastckpt.Manager("run", remote="remote/run", remote_bandwidth_limit={SIZE // 20})')
    one.do("manager.save(2, state)")
    said = eventually(lambda: (op := the("drain", once(place)))["running"] and op["sentence"])
    assert "remote not yet (step-00000001 " in said["text"]


def test_a_failed_drain_fails_the_gate_and_its_next_attempt_does_not(program, place, top, tmp_path):
    """Mutant: the gate judges only the save, which went well."""
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "run").write_text("no directory")
    one = program()
    one.manage(0)
    one.do("manager.save(3, state)")
    judged = eventually(lambda: found if "FAILED: drain" in (found := top("--check", "0")).stdout else None)
    assert judged.returncode == 1
    assert re.search("; E[A-Z]+ in step-00000003, drain failed", judged.stdout)
    (tmp_path / "remote" / "run").unlink()
    one.do("manager.wait()")
    judged = top("--check", "0")
    assert (judged.returncode, "ok: drain step-00000003 (done)" in judged.stdout) == (0, True)


def test_a_copy_and_a_fetch_are_operations_and_say_nothing_of_what_is_safe(program, place, tmp_path):
    """Mutant: a copy from the remote tier counts as a load."""
    one = program()
    one.manage(0)
    one.do("manager.save(5, state)")
    one.do("manager.wait()")
    one.begin(f'fastckpt.copy("run/step-00000005", "elsewhere", io=fastckpt.IO(bandwidth_limit={SIZE // 2}))')
    copy = eventually(lambda: op if (op := the("copy", once(place))) and op["done"] else None)
    assert (copy["phase"] in ("copy", "done"), copy["label"], copy["step"]) == (True, "elsewhere", None)
    assert one.said() == "ok"
    shutil.rmtree(tmp_path / "run" / "step-00000005")
    one.do("assert manager.restore().step == 5")
    tick = once(place)
    fetch = the("fetch", tick)
    assert (fetch["phase"], fetch["label"], fetch["step"]) == ("done", "step-00000005", 5)
    assert (fetch["done"], "safe" in fetch["sentence"]["text"]) == (fetch["bytes"], False)
    assert the("load", tick)["label"] == "step-00000005"


def copied(done, phase=Phase.DRAIN, kind=Kind.DRAIN, **values):
    """A process without workers that copies 1 GB."""
    rank = Rank(0, threads=0).op(0, phase, total=GB, kind=kind, **values)
    (op,) = rank.proc.operations
    rank.proc = replace(rank.proc, operations=(replace(op, bytes_durable=done),))
    return rank


def test_a_copy_that_moves_nothing_for_long_is_stalled_and_one_that_waits_for_other_nodes_is_not():
    """A store may be slow. Mutants: a copy stalls as early as a save; never; even when its own share is copied."""
    model = Model()

    def stalled(now, done):
        return look(model, now, copied(done).beat(int(10 * now))).rows[0].stalled_s

    assert [stalled(now, GB // 2) for now in (1.0, 2.0, 10.5)] == [None] * 3
    assert stalled(11.5, GB // 2) == 10.5
    assert model.main.sentence.words[0] == "rank 0 has made no progress for 10 s"
    assert [stalled(now, GB) for now in (13.0, 60.0)] == [None] * 2


def test_a_copy_whose_end_nobody_knows_says_why():
    """Mutant: the sentence says `ETA --:--`."""
    model = look(Model(), 2.0, copied(GB // 2))
    assert model.main.sentence.words[0] == "drain of step-1: 0.50 of 1.00 GB, 0.25 GB/s, no ETA: just begun"


def test_a_drain_that_was_given_up_says_so():
    """Mutant: the sentence says ECANCELED."""
    model = look(Model(), 2.0, copied(GB // 2, Phase.FAILED, end=1.0, error=errno.ECANCELED))
    assert (model.main.sentence.level, model.main.sentence.words[0]) == ("bad", "the drain was given up in step-1")


def test_a_checkpoint_is_at_the_remote_when_the_process_that_publishes_it_says_so():
    """The other processes copy their shares, and end earlier. Mutant: any drain that ends well is enough."""

    def places(flags):
        rank = Rank(0).record(-9.0, 1.0).record(-8.0, 1.0, op_id=2, kind=Kind.DRAIN, flags=flags)
        return sorted(look(Model(), 1.0, rank).jobs[0].safe)

    assert (places(0), places(FLAG_WHOLE)) == (["local"], ["local", "remote"])


def test_the_sentence_and_the_json_name_the_same_second():
    """Mutant: each output rounds the time in its own way."""
    model = look(Model(), 2.0, copied(GB // 2).record(-9.0, 1.9996, op_id=9))
    (job,) = jsonout.Ticks().next(model)["jobs"]
    at = time.strftime("%H:%M:%S", time.localtime(job["safe"]["local"]["t"]))
    assert model.main.sentence.words[0].endswith(f"last step safe at: local {at}, remote not yet")
