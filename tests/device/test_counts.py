"""The overhead of copies: calls into Python, events, waits, and bytes that the processor moves."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import torch

import fastckpt
from harness import devices, points
from harness.devices import DEVICE, SAVES, OnDevice, each, there
from harness.reports import with_report
from harness.standin import faults

MIB = 1 << 20
#: The fewest bytes that one call of the core passes, except at the ends of files and of workers' shares.
BATCH = 16 * MIB
#: Calls for the remainder: one for each worker, and one more.
THREADS = 2
SPARE = THREADS + 1
#: Numbers of 4 bytes in a small tensor: 10,000 such tensors almost fill a batch.
EACH = 384


@contextmanager
def calls_into_python():
    """Count calls of the core into Python, by kind, and the bytes that these calls pass."""
    counts = Counter()
    # Workers may call at the same time.
    lock = threading.Lock()

    def counted(where, name):
        def counting(usual):
            def call(self, ranges):
                ranges = list(ranges)
                with lock:
                    counts[name] += 1
                    counts[f"{name} bytes"] += sum(nbytes for *_, nbytes in ranges)
                return usual(self, ranges)

            return call

        return points.replaced(where, counting)

    with counted(points.FILL, "fill"), counted(points.PUT, "drain"):
        yield counts


def _direct(path):
    """Require direct I/O; the name of a file system that refuses it is in the report."""
    report = fastckpt.save({"w": torch.zeros(8 * MIB, dtype=torch.uint8)}, path)
    if report.engine == "buffered" or report.blocks.get("buffered"):
        devices.missing(f"needs direct I/O in {path.parent} ({report.fallback})")


class TestCounts(OnDevice):
    late = 0.0

    @each("count", [1, 3, 700])
    def test_calls_into_python_go_with_bytes_alone(self, count):
        """For any tensors, at most one call is made for each 16 MiB, which is less than 70 calls per GB."""
        total = 160 * MIB
        each_has = total // count // 4
        state = {str(index): torch.full((each_has,), float(index), device=DEVICE) for index in range(count)}
        nbytes = count * each_has * 4
        most = -(-nbytes // BATCH) + SPARE
        with calls_into_python() as counts:
            fastckpt.save(state, self.path / "c", io=fastckpt.IO(threads=THREADS))
        assert counts["fill bytes"] == nbytes
        assert 0 < counts["fill"] <= most, counts
        with calls_into_python() as counts:
            loaded = fastckpt.load(self.path / "c", device=DEVICE, io=fastckpt.IO(threads=THREADS))
        assert counts["drain bytes"] == nbytes
        assert 0 < counts["drain"] <= most, counts
        assert all(bool((value == int(name)).all()) for name, value in loaded.items())
        with calls_into_python() as counts:
            fastckpt.load(self.path / "c", into=state, io=fastckpt.IO(threads=THREADS))
        assert 0 < counts["drain"] <= most, counts

    @each("lazy", [False, True])
    def test_a_snapshot_takes_no_call_at_all(self, lazy):
        """For a snapshot, tensors on devices do not pass through the core."""
        state = {str(index): torch.full((4 * MIB,), float(index), device=DEVICE) for index in range(3)}
        with calls_into_python() as counts:
            report = fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(lazy=lazy)).result(60)
        assert counts["fill"] == 0
        assert report.staged == report.bytes == 48 * MIB
        loaded = fastckpt.load(self.path / "c")
        assert all(bool((value == int(name)).all()) for name, value in loaded.items())

    @each("way", SAVES)
    def test_the_processor_copies_nothing(self, way):
        _direct(self.path / "probe")
        state = {
            "large": torch.arange(8 * MIB, dtype=torch.int32, device=DEVICE),
            "odd": torch.ones(5 * MIB + 77, dtype=torch.uint8, device=DEVICE),
            **{f"small {index}": torch.full((1000,), float(index), device=DEVICE) for index in range(50)},
        }
        report = SAVES[way](state, self.path / "c")
        nbytes = sum(value.nbytes for value in state.values())
        if way == "save":
            assert (report.bytes, report.copied) == (nbytes, 0), report
            assert not report.blocks.get("buffered"), report
        else:
            # After the snapshot, the save is as for host tensors, where small tensors share staged blocks.
            assert (report.bytes, report.staged) == (nbytes, nbytes), report
            host = fastckpt.save({name: there(value) for name, value in state.items()}, self.path / "host")
            assert report.copied <= host.copied, report
        loaded, told = with_report(fastckpt.load, self.path / "c", device=DEVICE)
        assert (told.bytes, told.copied) == (nbytes, 0), told
        assert all(torch.equal(there(value), there(state[name])) for name, value in loaded.items())


class TestCountsOnTheStandin(OnDevice):
    on = "standin"
    late = 0.0

    def many(self, count):
        """Return ``count`` tensors of ``4 * EACH`` bytes, and their common source."""
        whole = torch.arange(count * EACH, dtype=torch.int32)
        return whole, dict(enumerate(whole.to(DEVICE).split(EACH)))

    def counted(self, call):
        before = faults.events, faults.transfers, sum(faults.host_waits.values()), faults.kernels
        result = call()
        after = faults.events, faults.transfers, sum(faults.host_waits.values()), faults.kernels
        return result, [new - old for new, old in zip(after, before, strict=True)]

    @each("way", SAVES)
    def test_10_000_small_tensors_are_gathered_to_save_them(self, way):
        _, warm = self.many(10)
        SAVES[way](warm, self.path / "warm")
        whole, state = self.many(10_000)
        _, (events, transfers, waits, kernels) = self.counted(lambda: SAVES[way](state, self.path / "c"))
        # 15 MiB need a batch or two, and their ends.
        assert events <= 10, events
        assert transfers <= 10, transfers
        assert waits <= 10, waits
        assert kernels <= 30, kernels
        loaded = fastckpt.load(self.path / "c")
        assert torch.equal(torch.cat([loaded[index] for index in range(10_000)]), whole)

    @each("is_into", [False, True])
    def test_10_000_small_tensors_are_spread_when_they_are_loaded(self, is_into):
        whole = torch.arange(10_000 * EACH, dtype=torch.int32)
        fastckpt.save(dict(enumerate(whole.split(EACH))), self.path / "c")
        target = torch.zeros(10_000 * EACH, dtype=torch.int32, device=DEVICE)
        into = dict(enumerate(target.split(EACH)))
        options = {"into": into} if is_into else {"device": DEVICE}
        loaded, (events, transfers, waits, kernels) = self.counted(lambda: fastckpt.load(self.path / "c", **options))
        assert events <= 10, events
        assert transfers <= 10, transfers
        assert waits <= 10, waits
        assert kernels <= 30, kernels
        found = target if is_into else torch.cat([loaded[index] for index in range(10_000)])
        devices.synchronize()
        assert torch.equal(there(found), whole)

    def test_the_hook_of_a_step_costs_the_same_for_many_tensors(self):
        """A lazy save of many small tensors holds the stream only once."""
        _, state = self.many(1000)
        fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(lazy=True)).result(60)
        before = sum(faults.stream_waits.values())
        fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(lazy=True)).result(60)
        assert sum(faults.stream_waits.values()) - before <= 4
