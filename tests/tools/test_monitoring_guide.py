"""The programs in docs/monitoring.md, unchanged."""

from __future__ import annotations

import errno
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import fastckpt
from harness import pages
from harness.internals import Job

GUIDE = pages.text("docs/monitoring.md")
TENSORBOARD, WANDB, TELEMETRY = pages.python("docs/monitoring.md")
STEPS = [100.0, 200.0, 300.0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a program of the guide in an empty directory, with a state and a step of training."""
    monkeypatch.chdir(tmp_path)

    def train_step(state):
        state["w"] += 1.0
        return float(state["w"][0])

    names = {"state": {"w": np.zeros(1000)}, "train_step": train_step}
    yield lambda program: exec(program, names)
    if "writer" in names:
        names["writer"].close()


def fail(_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=[False, True], ids=["saves end at once", "saves outlast the steps between them"])
def slow(request, monkeypatch):
    """In one case, no save is done while the steps continue; in the other, every save is done at the first query."""
    monkeypatch.setattr(fastckpt.types.PendingSave, "done", lambda save: not request.param and save.finished.wait(60))


def test_tensorboard(run, slow):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TENSORBOARD)
    written = EventAccumulator("runs/1")
    written.Reload()
    names = set(written.Tags()["scalars"])
    assert {"loss", "checkpoint/save_seconds", "checkpoint/save_stall_seconds", "checkpoint/save_stage_seconds"} < names
    for name in names - {"loss"}:
        assert [event.step for event in written.Scalars(name)] == STEPS
    assert [event.value for event in written.Scalars("checkpoint/save_bytes")] == [8000.0] * 3


@pytest.mark.parametrize("program", [TENSORBOARD, WANDB])
def test_failures_are_raised(run, slow, monkeypatch, program):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: Run()))
    monkeypatch.setattr(Job, "_write", fail)
    with pytest.raises(OSError, match="No space left"):
        run(program)
    fastckpt.background.drain(60)  # raises errors that no call raised yet


class Run:
    """The documented interface of a run of Weights & Biases: flat dicts of numbers, on defined axes."""

    def __init__(self):
        self.axes, self.rows, self.finished = {}, [], False

    def define_metric(self, name, *, step_metric=None):
        assert isinstance(name, str)
        self.axes[name] = step_metric

    def log(self, data):
        assert not self.finished
        assert all(type(name) is str and type(value) in (int, float) for name, value in data.items())
        self.rows.append(data)

    def finish(self):
        self.finished = True


def test_wandb(run, slow, monkeypatch):
    made = []

    def init(*, project):
        assert isinstance(project, str)
        made.append(Run())
        return made[0]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run(WANDB)
    saves = [row for row in made[0].rows if "loss" not in row]
    assert [row["checkpoint/save_step"] for row in saves] == STEPS
    assert made[0].axes == {"checkpoint/save_step": None, "checkpoint/*": "checkpoint/save_step"}
    assert all(name.startswith("checkpoint/") for row in saves for name in row)
    assert made[0].finished


class Collector(http.server.BaseHTTPRequestHandler):
    """Receives OTLP messages."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_opentelemetry(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "NO_PROXY": "127.0.0.1",
            "RANK": "3",
        }
        code = f"state = {{'a': b'1234'}}\n{TELEMETRY}"
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)
        server.shutdown()
    names, ranks, instruments = set(), set(), set()
    for path, body in server.got:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                ranks |= {one.value.string_value for one in resource.resource.attributes if "instance" in one.key}
                names |= {span.name for scope in resource.scope_spans for span in scope.spans}
        else:
            assert path == "/v1/metrics"
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                instruments |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    assert {"step", "fastckpt.save", "megatron.checkpoint.save.io_write"} <= names
    assert ranks == {"3"}
    assert {"fastckpt.operation.duration", "fastckpt.operation.bytes"} <= instruments


def test_all_names_are_in_the_guide():
    source = Path(fastckpt.__path__[0], "_api", "open_telemetry.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:fastckpt|megatron)\.[a-z_.]+)"', source)) - {
        "megatron.checkpoint.",
        "fastckpt.gigabytes_per_second",
    }
    assert len(names) > 10
    assert {name for name in names if name not in GUIDE} == set()
    listed = {name for line in re.findall(r"names? (?:=|in) \((.*)\)", source) for name in re.findall(r"\w+", line)}
    assert {"bytes", "step", "bytes_total"} < listed
    assert {name for name in listed if f"`{name}`" not in GUIDE} == set()
