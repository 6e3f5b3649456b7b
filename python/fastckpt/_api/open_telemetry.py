"""Spans and metrics of operations, through the API of OpenTelemetry; the program supplies the SDK, if any.

Spans are made from the report after the operation has ended: their times are the report's. So the number of calls does
not depend on the amount written. docs/monitoring.md lists all names.
"""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace
from opentelemetry.trace import StatusCode

from fastckpt import _core

from .reports import SaveReport, VerifyReport

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span, Tracer

    from .ended import Ended

#: Names that dashboards for Megatron-LM use: spans of the training loop, then phases.
_HELD: Final = {"save": "megatron.checkpoint.save", "load": "megatron.checkpoint.load"}
_PHASES: Final = {
    ("save", "plan"): "megatron.checkpoint.save.state_dict",
    ("save", "write"): "megatron.checkpoint.save.io_write",
    ("load", "read"): "megatron.checkpoint.load.io_read",
}
#: Bounds of the histograms, in seconds and in bytes per second: OpenTelemetry's defaults are for milliseconds.
_DURATIONS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_STALLS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_RATES: Final = (1e8, 2.5e8, 5e8, 7.5e8, 1e9, 1.5e9, 2e9, 3e9, 4e9, 6e9, 8e9, 1e10, 1.5e10, 2e10, 5e10, 1e11)


class Exporter:
    """The tracer and the instruments of an operation.

    Args:
        tracer: receives the spans.
        meter: makes the instruments.
    """

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._duration = meter.create_histogram(
            "fastckpt.operation.duration",
            unit="s",
            description="Duration of loads and verifications, and of saves until they are durable.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._stall = meter.create_histogram(
            "fastckpt.operation.stall",
            unit="s",
            description="Time for which a save blocked its caller.",
            explicit_bucket_boundaries_advisory=_STALLS,
        )
        self._rate = meter.create_histogram(
            "fastckpt.operation.throughput",
            unit="By/s",
            description="Bytes of tensors divided by the duration.",
            explicit_bucket_boundaries_advisory=_RATES,
        )
        self._bytes = meter.create_counter(
            "fastckpt.operation.bytes", unit="By", description="Bytes of tensors saved, loaded and verified."
        )
        self._failures = meter.create_counter(
            "fastckpt.operation.failures", unit="{failure}", description="Operations that failed or found damage."
        )

    def export(self, ended: Ended) -> None:
        """Record one span below the current one, with a span for each phase in it, and the metrics."""
        begin = ended.at - round(ended.seconds * 1e9)
        # Megatron-LM wraps this span in its own spans: the time must not be counted twice under their names.
        around = getattr(trace.get_current_span(), "name", "")
        theirs = not around.startswith("megatron.checkpoint.")
        span = self._tracer.start_span(f"fastckpt.{ended.operation}", start_time=begin)
        if span.is_recording():
            span.set_attributes(_attributes(ended))
            self._phases(ended, span, begin, theirs=theirs)
            _conclude(ended, span)
        span.end(ended.at)
        self._measure(ended, span)

    def _phases(self, ended: Ended, span: Span, begin: int, *, theirs: bool) -> None:
        """Spans of the phases, one after the other."""
        report, operation = ended.report, ended.operation
        if report is None:
            return
        context = trace.set_span_in_context(span)
        if theirs and operation in _HELD:
            held, step = (report.stall, report.step) if isinstance(report, SaveReport) else (report.seconds, None)
            iteration = None if step is None else {"megatron.iteration": step}
            outer = self._tracer.start_span(_HELD[operation], context, attributes=iteration, start_time=begin)
            outer.end(min(begin + round(held * 1e9), ended.at))
            if not ended.asynchronous:
                context = trace.set_span_in_context(outer)
        for phase, seconds in report.phases.items():
            ours = f"fastckpt.{operation}.{phase}"
            name = _PHASES.get((operation, phase), ours) if theirs else ours
            end = min(begin + round(seconds * 1e9), ended.at)
            self._tracer.start_span(name, context, start_time=begin).end(end)
            begin = end

    def _measure(self, ended: Ended, span: Span) -> None:
        report, failure = ended.report, _failure(ended)
        if isinstance(ended.error, CancelledError):
            return
        # With the span's context, an exemplar leads from a bucket to its trace.
        context = trace.set_span_in_context(span)
        labels: dict[str, Any] = {
            "fastckpt.operation": ended.operation,
            "fastckpt.asynchronous": ended.asynchronous,
        }
        if failure is not None:
            failed = {**labels, "error.type": failure}
            self._failures.add(1, failed, context)
            self._duration.record(ended.seconds, failed, context)
            return
        assert report is not None  # noqa: S101 - an operation without an error has a report
        labels["fastckpt.engine"] = report.engine
        self._duration.record(ended.seconds, labels, context)
        self._bytes.add(report.bytes, labels, context)
        if report.bytes:
            self._rate.record(report.gigabytes_per_second * 1e9, labels, context)
        if isinstance(report, SaveReport):
            self._stall.record(report.stall, labels, context)


def _attributes(ended: Ended) -> dict[str, Any]:
    """The attributes of the operation's span, without those that are None."""
    report = ended.report
    found: dict[str, Any] = {"fastckpt.path": ended.path, "fastckpt.asynchronous": ended.asynchronous}
    if report is not None:
        names = ("bytes", "engine", "fallback", "threads", "tensors", "shards", "copied", "warnings")
        found |= {f"fastckpt.{name}": getattr(report, name) for name in names}
        found["fastckpt.gigabytes_per_second"] = report.gigabytes_per_second
        for name in ("step", "stall"):
            found[f"fastckpt.{name}"] = getattr(report, name, None)
        if getattr(report, "ranks", 1) > 1:
            for name in ("rank", "ranks", "bytes_total"):
                found[f"fastckpt.{name}"] = getattr(report, name, None)
    return {name: value for name, value in found.items() if value is not None and value != ()}


def _conclude(ended: Ended, span: Span) -> None:
    """Set the status of the span."""
    error, failure = ended.error, _failure(ended)
    if isinstance(error, CancelledError):
        span.set_attribute("fastckpt.cancelled", True)
    elif failure is not None:
        span.set_attribute("error.type", failure)
        if error is not None:
            span.record_exception(error, timestamp=ended.at)
        span.set_status(StatusCode.ERROR, str(error if error is not None else ended.report))


def _failure(ended: Ended) -> str | None:
    """The kind of failure, from a small set of names: an errno, a class, or ``damage``; None without a failure."""
    error, report = ended.error, ended.report
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "OSError")
    if error is not None:
        return type(error).__qualname__
    return "damage" if isinstance(report, VerifyReport) and not report.ok else None


# Without an SDK in the program, these calls do nothing; they find an SDK that is set up later.
_exporter = Exporter(trace.get_tracer("fastckpt", _core.__version__), metrics.get_meter("fastckpt", _core.__version__))


def export(ended: Ended) -> None:
    """Export an operation that has ended to the SDK of the program."""
    _exporter.export(ended)
