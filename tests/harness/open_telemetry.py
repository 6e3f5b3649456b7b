"""An SDK of OpenTelemetry in memory, and what it got."""

from __future__ import annotations

import threading

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fastckpt._api import open_telemetry


class Sdk:
    """An SDK in memory."""

    def __init__(self):
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.tracer = self.provider.get_tracer("program")
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.exporter = open_telemetry.Exporter(self.tracer, self.meters.get_meter("program"))

    def spans(self):
        """Ours by name; each name once."""
        found = [span for span in self.kept.get_finished_spans() if span.name.startswith(("fastckpt.", "megatron."))]
        named = {span.name: span for span in found}
        assert len(named) == len(found)
        return named

    def points(self):
        """The data points by name of the instrument."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        metrics = [metric for one in data.resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in metrics}


def parent(span):
    """The number of its parent, or None."""
    return span.parent.span_id if span.parent else None


def join():
    """Wait until the threads of asynchronous saves have ended: they export after ``result()`` has returned."""
    for thread in threading.enumerate():
        if thread.name == "fastckpt-save":
            thread.join(60)
            assert not thread.is_alive()
