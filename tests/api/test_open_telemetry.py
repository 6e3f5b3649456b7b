"""Spans and metrics that an OpenTelemetry SDK receives from saves, loads and verifications."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import StatusCode

import fastckpt
from harness.internals import Job, Staging, join_saves
from harness.open_telemetry import forget_failures, listening, parent
from harness.reports import with_report

STATE = {"w": np.arange(1000.0), "v": np.ones(7)}
SLOWLY = 10_000  # bytes a second


@pytest.fixture
def sdk():
    with listening() as made:
        yield made


@pytest.fixture(autouse=True)
def no_failure_left():
    yield
    forget_failures()


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_save_is_a_span_with_its_phases_in_the_callers(sdk, tmp_path):
    with sdk.tracer.start_as_current_span("step") as step:
        report = fastckpt.save(STATE, tmp_path / "c", metadata={"step": 12})
    spans = sdk.spans()
    whole, held = spans["fastckpt.save"], spans["megatron.checkpoint.save"]
    assert parent(whole) == step.get_span_context().span_id
    assert parent(held) == whole.context.span_id
    assert held.attributes == {"megatron.iteration": 12}
    phases = {
        "plan": "megatron.checkpoint.save.state_dict",
        "write": "megatron.checkpoint.save.io_write",
        "fsync": "fastckpt.save.fsync",
        "commit": "fastckpt.save.commit",
    }
    assert set(spans) == {"fastckpt.save", "megatron.checkpoint.save", *phases.values()}
    assert list(report.phases) == list(phases)
    at = whole.start_time
    for phase, name in phases.items():
        assert parent(spans[name]) == held.context.span_id
        assert spans[name].start_time == at
        assert seconds(spans[name]) == pytest.approx(report.phases[phase], abs=2e-9)
        at = spans[name].end_time
    assert seconds(whole) == pytest.approx(report.seconds, abs=2e-9)
    assert seconds(held) == pytest.approx(report.seconds, abs=2e-9)
    assert at <= whole.end_time
    expected = {
        "fastckpt.path": report.path,
        "fastckpt.asynchronous": False,
        "fastckpt.bytes": report.bytes,
        "fastckpt.engine": report.engine,
        "fastckpt.threads": report.threads,
        "fastckpt.tensors": 2,
        "fastckpt.shards": 1,
        "fastckpt.copied": report.copied,
        "fastckpt.gigabytes_per_second": report.gigabytes_per_second,
        "fastckpt.step": 12,
        "fastckpt.stall": report.stall,
    }
    if report.fallback:
        expected["fastckpt.fallback"] = report.fallback
    assert whole.attributes == expected
    assert whole.status.status_code is StatusCode.UNSET


def test_an_asynchronous_save_ends_when_durable_in_the_span_of_its_call(sdk, tmp_path, monkeypatch):
    returned = threading.Event()
    write = Job._write

    def wait_and_write(job):
        assert returned.wait(60)
        return write(job)

    monkeypatch.setattr(Job, "_write", wait_and_write)
    with sdk.tracer.start_as_current_span("step") as step:
        pending = fastckpt.save_async(STATE, tmp_path / "c", metadata={"step": 3})
    assert sdk.spans() == {}
    returned.set()
    report = pending.result(60)
    join_saves()
    spans = sdk.spans()
    whole, held = spans["fastckpt.save"], spans["megatron.checkpoint.save"]
    assert parent(whole) == step.get_span_context().span_id
    assert whole.end_time > step.end_time
    assert seconds(whole) == pytest.approx(report.seconds, abs=2e-9)
    assert seconds(held) == pytest.approx(report.stall, abs=2e-9)
    assert held.attributes == {"megatron.iteration": 3}
    assert seconds(spans["fastckpt.save.stage"]) == pytest.approx(report.phases["stage"], abs=2e-9)
    others = set(spans) - {"fastckpt.save"}
    assert "fastckpt.save.wait" in others
    # The phases are siblings of the caller's stall, because they go on after it.
    assert {parent(spans[name]) for name in others} == {whole.context.span_id}
    assert whole.attributes["fastckpt.asynchronous"] is True
    [point] = sdk.points()["fastckpt.operation.stall"]
    assert point.sum == report.stall


def test_loads_and_verifications(sdk, tmp_path):
    fastckpt.save(STATE, tmp_path / "c")
    sdk.kept.clear()
    report = with_report(fastckpt.load, tmp_path / "c").report
    spans = sdk.spans()
    assert set(spans) == {
        "fastckpt.load",
        "fastckpt.load.plan",
        "megatron.checkpoint.load",
        "megatron.checkpoint.load.io_read",
    }
    assert spans["megatron.checkpoint.load"].attributes == {}
    assert parent(spans["megatron.checkpoint.load.io_read"]) == spans["megatron.checkpoint.load"].context.span_id
    assert seconds(spans["megatron.checkpoint.load.io_read"]) == pytest.approx(report.phases["read"], abs=2e-9)
    sdk.kept.clear()
    fastckpt.verify(tmp_path / "c")
    assert set(sdk.spans()) == {"fastckpt.verify", "fastckpt.verify.plan", "fastckpt.verify.read"}


def test_damage_counts_as_a_failure(sdk, tmp_path):
    fastckpt.save(STATE, tmp_path / "c")
    sdk.kept.clear()
    [shard] = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert not fastckpt.verify(tmp_path / "c").ok
    span = sdk.spans()["fastckpt.verify"]
    assert span.status.status_code is StatusCode.ERROR
    assert "1 damaged range" in span.status.description
    assert span.attributes["error.type"] == "damage"
    [failures] = sdk.points()["fastckpt.operation.failures"]
    assert failures.attributes["error.type"] == "damage"


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def save_fails(path, _):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fastckpt.save(STATE, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def save_async_fails(path, monkeypatch):
    monkeypatch.setattr(Job, "_write", no_space)
    pending = fastckpt.save_async(STATE, path)
    with pytest.raises(OSError, match="No space"):
        pending.result(60)
    join_saves()


def the_copy_fails(path, monkeypatch):
    monkeypatch.setattr(Staging, "begin", no_space)
    with pytest.raises(OSError, match="No space"):
        fastckpt.save_async(STATE, path)


def the_call_fails(path, _):
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError):
        fastckpt.save_async({"f": print}, path)


def load_fails(path, _):
    with pytest.raises(FileNotFoundError):
        fastckpt.load(path)


def verify_fails(path, _):
    with pytest.raises(FileNotFoundError):
        fastckpt.verify(path)


@pytest.mark.parametrize(
    ("fail", "operation", "kind", "asynchronous"),
    [
        (save_fails, "save", "EFBIG", False),
        (save_async_fails, "save", "ENOSPC", True),
        (the_copy_fails, "save", "ENOSPC", True),
        (the_call_fails, "save", "UnsupportedTypeError", True),
        (load_fails, "load", "ENOENT", False),
        (verify_fails, "verify", "ENOENT", False),
    ],
)
def test_what_fails_is_one_span_with_its_error(sdk, tmp_path, monkeypatch, fail, operation, kind, asynchronous):
    with sdk.tracer.start_as_current_span("step") as step:
        fail(tmp_path / "c", monkeypatch)
    spans = sdk.spans()
    assert set(spans) == {f"fastckpt.{operation}"}
    span = spans[f"fastckpt.{operation}"]
    assert parent(span) == step.get_span_context().span_id
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == kind
    assert span.attributes["fastckpt.path"] == str(tmp_path / "c")
    assert [event.name for event in span.events] == ["exception"]
    points = sdk.points()
    assert set(points) == {"fastckpt.operation.duration", "fastckpt.operation.failures"}
    labels = {"fastckpt.operation": operation, "fastckpt.asynchronous": asynchronous, "error.type": kind}
    [failures] = points["fastckpt.operation.failures"]
    assert (failures.attributes, failures.value) == (labels, 1)
    [duration] = points["fastckpt.operation.duration"]
    assert duration.attributes == labels


def test_what_is_cancelled_is_no_failure(sdk, tmp_path):
    pending = fastckpt.save_async({"w": np.ones(2_000_000)}, tmp_path / "c", io=fastckpt.IO(bandwidth_limit=SLOWLY))
    assert pending.cancel()
    join_saves()
    [span] = sdk.spans().values()
    assert span.attributes["fastckpt.cancelled"] is True
    assert span.status.status_code is StatusCode.UNSET
    assert sdk.points() == {}


def test_metrics_are_the_figures_of_the_reports(sdk, tmp_path):
    saves = [fastckpt.save(STATE, tmp_path / "c", io="buffered") for _ in range(3)]
    points = sdk.points()
    labels = {"fastckpt.operation": "save", "fastckpt.asynchronous": False, "fastckpt.engine": "buffered"}
    assert all(point.attributes == labels for listed in points.values() for point in listed)
    [duration] = points["fastckpt.operation.duration"]
    assert (duration.count, duration.sum) == (3, pytest.approx(sum(report.seconds for report in saves)))
    [rate] = points["fastckpt.operation.throughput"]
    assert rate.sum == pytest.approx(sum(report.bytes / report.seconds for report in saves))
    assert rate.explicit_bounds[-1] == 1e11
    [count] = points["fastckpt.operation.bytes"]
    assert count.value == sum(report.bytes for report in saves)
    assert "fastckpt.operation.failures" not in points
    [stall] = points["fastckpt.operation.stall"]
    [exemplar] = stall.exemplars[-1:]
    spans = {span.context.span_id for span in sdk.kept.get_finished_spans() if span.name == "fastckpt.save"}
    assert exemplar.span_id in spans


def test_megatrons_names_are_left_to_megatron_inside_its_spans(sdk, tmp_path):
    with sdk.tracer.start_as_current_span("megatron.checkpoint.save.io_write"):
        fastckpt.save(STATE, tmp_path / "c")
    assert sorted(span.name for span in sdk.kept.get_finished_spans()) == [
        "fastckpt.save",
        "fastckpt.save.commit",
        "fastckpt.save.fsync",
        "fastckpt.save.plan",
        "fastckpt.save.write",
        "megatron.checkpoint.save.io_write",
    ]


def test_the_number_of_calls_does_not_depend_on_what_is_written(sdk, tmp_path):
    calls = []

    class Counted:
        def __init__(self, inner, names):
            for name in names:
                setattr(self, name, self._counting(getattr(inner, name), name))

        @staticmethod
        def _counting(function, name):
            def counting(*args, **kwargs):
                calls.append(name)
                return function(*args, **kwargs)

            return counting

    instruments = SimpleNamespace(
        create_histogram=lambda *_, **__: Counted(SimpleNamespace(record=lambda *_: None), ["record"]),
        create_counter=lambda *_, **__: Counted(SimpleNamespace(add=lambda *_: None), ["add"]),
    )
    sdk.take(Counted(sdk.tracer, ["start_span"]), instruments)
    small = fastckpt.save({"w": np.ones(10)}, tmp_path / "small")
    few, calls[:] = list(calls), []
    many = {str(index): np.ones(2000) for index in range(2000)}
    large = fastckpt.save(many, tmp_path / "large", files=fastckpt.Files(shard_size="4MB"))
    assert sum(large.blocks.values()) > sum(small.blocks.values())
    assert large.shards > small.shards
    assert calls == few
    assert (calls.count("start_span"), len(calls)) == (6, 10)


def test_a_broken_sdk_does_not_break_a_save(sdk, tmp_path, caplog):
    class Broken(SpanProcessor):
        def on_end(self, _):
            raise RuntimeError("no such collector")

    sdk.provider.add_span_processor(Broken())
    with caplog.at_level(logging.ERROR, "fastckpt"):
        for name in ("a", "b"):
            fastckpt.save(STATE, tmp_path / name)
            fastckpt.save_async(STATE, tmp_path / name).result(60)
            join_saves()
            assert fastckpt.verify(tmp_path / name).ok
    [record] = [record for record in caplog.records if "OpenTelemetry" in record.message]
    assert "no such collector" in str(record.exc_info[1])


def test_what_waits_for_an_asynchronous_save_does_not_wait_for_the_exporter(sdk, tmp_path, monkeypatch):
    begin, called, go = threading.Event(), threading.Event(), threading.Event()
    write = Job._write
    at = []

    class Blocks(SpanProcessor):
        def on_end(self, _):
            assert go.wait(60)

    def write_later(job):
        assert begin.wait(60)
        return write(job)

    def after(_):
        at.append(time.time_ns())
        called.set()

    monkeypatch.setattr(Job, "_write", write_later)
    sdk.provider.add_span_processor(Blocks())
    pending = fastckpt.save_async(STATE, tmp_path / "c")
    pending.add_done_callback(after)
    begin.set()
    try:
        assert called.wait(60)
    finally:
        go.set()
    join_saves()
    # The span ends when the save ended, not when the end was reported.
    assert sdk.spans()["fastckpt.save"].end_time <= at[0]


def test_a_signal_handler_may_save_while_a_span_is_exported(sdk, tmp_path):
    lock = threading.Lock()

    class Handler(SpanProcessor):
        """A processor that saves while it holds a non-reentrant lock, as if a signal interrupted an exporter."""

        saved = False

        def on_end(self, _):
            assert lock.acquire(timeout=20)
            if not self.saved:
                self.saved = True
                fastckpt.save(STATE, tmp_path / "handler")
            lock.release()

    sdk.provider.add_span_processor(Handler())
    fastckpt.save(STATE, tmp_path / "interrupted")
    paths = [span.attributes["fastckpt.path"] for span in sdk.kept.get_finished_spans() if span.name == "fastckpt.save"]
    assert paths == [str(tmp_path / "interrupted"), str(tmp_path / "handler")]


def child(code, **env):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **env},
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_program_without_it_never_imports_it(tmp_path):
    code = f"""
import sys
{{}}
import fastckpt
path = {str(tmp_path / "c")!r}
fastckpt.save({{{{"a": 1}}}}, path), fastckpt.save_async({{{{"a": 1}}}}, path).result(), fastckpt.load(path)
print([name for name, module in sys.modules.items() if "telemetry" in name and module])
"""
    assert child(code.format("")) == "[]"
    # A None in sys.modules acts as if OpenTelemetry were not installed.
    assert child(code.format("sys.modules['opentelemetry'] = None")) == "[]"


PROGRAM = """
import sys
import fastckpt
path = sys.argv[1] if sys.argv[1:] else "{path}"
from opentelemetry import trace
fastckpt.save({{"a": 1}}, path)  # no listener yet
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
fastckpt.load(path)
print([span.name for span in kept.get_finished_spans() if span.name.startswith("fastckpt")])
"""


def test_a_program_that_sets_up_an_sdk_need_do_nothing_else(tmp_path):
    code = PROGRAM.format(path=tmp_path / "c")
    assert child(code) == "['fastckpt.load.plan', 'fastckpt.load']"
    assert child(code, FASTCKPT_OTEL="0") == "[]"
