"""Counts what saves from a device and loads to it cost in Python calls and CPU time. Needs no GPU."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import fastckpt
from bench import GB
from bench.gpu_device import Pinned
from bench.measure import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.gpu_device import Device, DeviceWorkload

#: Seconds between two attempts of a :class:`Ticker` to get the interpreter's lock.
TICK = 100e-6


class Calls:
    """Counts calls of the core into Python, each of which takes the interpreter's lock."""

    def __init__(self) -> None:
        self.calls = 0
        self.ranges = 0

    @contextmanager
    def counting(self) -> Iterator[Calls]:
        """Count calls inside the ``with`` statement."""
        from fastckpt._tensors import movers

        kept = [(movers.Sources, "fill", movers.Sources.fill), (movers.Sinks, "drain", movers.Sinks.drain)]
        for owner, name, method in kept:
            setattr(owner, name, self.counted(method))
        try:
            yield self
        finally:
            for owner, name, method in kept:
                setattr(owner, name, method)

    def counted(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return the method with a counter of its calls."""

        def call(this: Any, ranges: Any) -> None:
            self.calls += 1
            self.ranges += len(ranges)
            method(this, ranges)

        return call


class Ticker:
    """A thread that requests the interpreter's lock every 100 us, and records how late it gets the lock.

    The thread cannot distinguish waits for the lock from waits for a core, so its result is compared with an idle one.
    """

    def __init__(self) -> None:
        self.late: list[float] = []
        self.seconds = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began = time.perf_counter()
        while not self._end.is_set():
            slept = time.perf_counter()
            time.sleep(TICK)
            self.late.append(time.perf_counter() - slept - TICK)
        self.seconds = time.perf_counter() - began

    def __enter__(self) -> Ticker:  # noqa: PYI034 - Self is not in Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def document(self, usual: float) -> dict[str, float]:
        """Return how many seconds per second it waited beyond its ``usual`` lateness, and the longest wait."""
        return {
            "per_second": sum(max(0.0, late - usual) for late in self.late) / self.seconds if self.seconds else 0.0,
            "worst_ms": max(self.late, default=0.0) * 1e3,
        }


def idle(seconds: float) -> tuple[dict[str, float], float]:
    """Return the result of a :class:`Ticker` while nothing else runs, and its usual lateness."""
    with Ticker() as ticker:
        time.sleep(seconds)
    usual = statistics.median(ticker.late)
    return ticker.document(usual), usual


def operation(device: Device, pinned: Pinned, run: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Do one operation and return its counts; ``run`` returns a report, and the loaded state or None."""
    calls, ticker = Calls(), Ticker()
    before, usual = idle(0.3)

    def timed() -> Any:
        with ticker:
            done = run()
            device.synchronize()
        return done

    with calls.counting():
        sample, (report, loaded) = measure(timed)
    size = max(1, report.bytes)
    return {
        "bytes": report.bytes,
        "seconds": sample.seconds,
        "cpu_seconds_per_gigabyte": sample.cpu / (size / GB),
        "calls": calls.calls,
        "ranges": calls.ranges,
        "calls_per_gigabyte": calls.calls / (size / GB),
        "copied_per_byte": report.copied / size,
        "extra_megabytes": None if sample.extra is None else sample.extra / 1e6,
        "pinned_megabytes": pinned.peak / 1e6,
        "lock": ticker.document(usual),
        "lock_idle": before,
        "engine": report.engine,
        "fallback": report.fallback,
        "warnings": list(report.warnings),
        "paths": dict(report.paths),
    }, loaded


def measure_counts(device: Device, workload: DeviceWorkload, directory: Path) -> dict[str, Any]:
    """Return the counts of a save, an asynchronous save, a load with ``device=`` and one with ``into=``."""
    pinned = Pinned()
    pinned.install()
    state = workload.make()
    path = directory / "counts"
    where = str(device.device)

    def again(run: Callable[[], Any]) -> dict[str, Any]:
        # Only the second call is counted: everything that is kept between calls exists by then.
        run()
        found, _ = operation(device, pinned, run)
        return found

    def loaded(**options: Any) -> tuple[Any, Any]:
        reports: list[Any] = []
        state = fastckpt.load(path, io=fastckpt.IO(on_report=reports.append), **options)
        return reports[0], state

    found = {
        "save": again(lambda: (fastckpt.save(state, path), None)),
        "save_async": again(lambda: (fastckpt.save_async(state, path).result(), None)),
        "load": again(lambda: loaded(device=where)),
    }
    blank = workload.make_blank()
    found["into"] = again(lambda: loaded(into=blank))
    return found
