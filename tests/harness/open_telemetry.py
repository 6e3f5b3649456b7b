"""An OpenTelemetry SDK in memory, and its records."""

from __future__ import annotations

import contextlib

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fastckpt
from fastckpt._api import export, open_telemetry


class Sdk:
    """An SDK in memory."""

    def __init__(self):
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.tracer = self.provider.get_tracer("program")
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.meter = self.meters.get_meter("program")
        self.take(self.tracer, self.meter)

    @staticmethod
    def take(tracer, meter):
        """Export the work of this process to this SDK from now on."""
        open_telemetry._exporter = open_telemetry.Exporter(tracer, meter)

    def close(self):
        """Shut the SDK down."""
        self.provider.shutdown()
        self.meters.shutdown()

    def spans(self):
        """The spans of fastckpt by name; each name must occur once."""
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
    """The id of the span's parent, or None."""
    return span.parent.span_id if span.parent else None


@contextlib.contextmanager
def listening():
    """An SDK that records the work of this process during the ``with`` statement, as if none had been set before."""
    before, export._told = (open_telemetry._exporter, export._told), False
    made = Sdk()
    try:
        yield made
    finally:
        open_telemetry._exporter, export._told = before
        made.close()


def forget_failures():
    """Discard the failures of asynchronous saves whose results were never read."""
    while True:
        with contextlib.suppress(OSError, fastckpt.CheckpointError):
            fastckpt.background.drain(60)
            return
