"""Rates over a sliding window, on the reader's clock."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from fastckpt_top.segment import HISTOGRAM_BASE_US, HISTOGRAM_BUCKETS

WINDOW_S: Final = 1.0
"""Seconds of the window. Each completion adds a whole block, so shorter windows show the block size, not the disk."""
LONGEST_S: Final = 5.0
"""Seconds up to which the window grows while it holds too few completions."""
ENOUGH: Final = 5
"""Completions that make a window meaningful."""
MISSED: Final = 3
"""If this many completions were expected in a second or more but none came, the rate is zero at once."""
_SLACK_S: Final = 0.05
WAITS: Final = ("disk", "source", "limit", "fsync", "peers")
"""What a thread may wait for, one at a time: a request, a block, the bandwidth limit, fsync, bytes of other ranks."""


class Sample(NamedTuple):
    """Counters at one moment. All but `mono` only grow.

    Attributes:
        mono: Seconds.
        bytes: Completed bytes.
        requests: Completed requests.
        latency_ns: Sum over completed requests.
        waits: Seconds spent waiting, as in `WAITS`; None if they are unknown, and then `latency_ns` is, too.
    """

    mono: float
    bytes: int
    requests: int = 0
    latency_ns: int = 0
    waits: tuple[float, ...] | None = (0.0,) * len(WAITS)


class Window:
    """The samples of one source, kept as long as rates need them."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Add the newest sample; start over if a counter went back (it has another owner), or the clock did."""
        samples = self._samples
        if samples and (sample.mono < samples[-1].mono or sample.bytes < samples[-1].bytes):
            samples.clear()
        if samples and sample.mono == samples[-1].mono:
            samples[-1] = sample
        else:
            samples.append(sample)
        while len(samples) > 2 and samples[1].mono < sample.mono - LONGEST_S:  # noqa: PLR2004
            samples.popleft()

    def ends(self) -> tuple[Sample, Sample] | None:
        """The window's oldest and newest sample; None if there is only one."""
        samples = self._samples
        if len(samples) < 2:  # noqa: PLR2004
            return None
        newest = samples[-1]
        chosen = samples[-2]
        for index in range(len(samples) - 2, -1, -1):
            chosen = samples[index]
            age = newest.mono - chosen.mono
            if age >= LONGEST_S or (age >= WINDOW_S - _SLACK_S and newest.requests - chosen.requests >= ENOUGH):
                break
        return (self._still(chosen, newest) or chosen), newest

    def waits(self) -> tuple[Sample, Sample] | None:
        """Like `ends`, but with known waits: of all samples, only the first may have unknown ones."""
        ends = self.ends()
        if ends is None or ends[0].waits is not None:
            return ends
        return (self._samples[1], ends[1]) if len(self._samples) > 2 else None  # noqa: PLR2004

    def _still(self, chosen: Sample, newest: Sample) -> Sample | None:
        """The time of the last completion, if much should have completed since."""
        last = next(one for one in self._samples if one.requests == newest.requests)
        quiet, moving = newest.mono - last.mono, last.mono - chosen.mono
        if quiet < WINDOW_S - _SLACK_S or moving <= 0:
            return None
        return last if (newest.requests - chosen.requests) * quiet >= MISSED * moving else None

    def rate(self) -> float | None:
        """Bytes/s over the window; None while unknown."""
        ends = self.ends()
        if ends is None:
            return 0.0 if self._samples and not self._samples[-1].bytes else None
        old, new = ends
        if not old.bytes and new.bytes:  # the time before the first completion was not spent moving bytes
            old = next(sample for sample in reversed(self._samples) if not sample.bytes)
        return (new.bytes - old.bytes) / (new.mono - old.mono)


def percentile(histogram: tuple[int, ...], share: float, largest: float) -> float | None:
    """Estimate a percentile from a latency histogram.

    Args:
        histogram: Requests per bucket (docs/telemetry.md 5.4).
        share: 0 to 1.
        largest: The longest measured latency, seconds, as the end of the last bucket. 0 if unknown.

    Returns:
        Seconds, interpolated within the bucket; None if nothing was counted.
    """
    total = sum(histogram)
    if total <= 0:
        return None
    wanted = share * total
    seen = 0
    for index, count in enumerate(histogram):
        if count and seen + count >= wanted:
            low = 0.0 if index == 0 else HISTOGRAM_BASE_US * 2.0 ** (index - 1)
            high = HISTOGRAM_BASE_US * 2.0**index if index < HISTOGRAM_BUCKETS - 1 else max(low, largest * 1e6)
            estimate = (low + (high - low) * (wanted - seen) / count) / 1e6
            return min(estimate, largest) if largest > 0 else estimate
        seen += count
    return None
