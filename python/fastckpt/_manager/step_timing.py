"""The duration of steps and the cost of saves, measured at the boundaries that the manager sees."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from fastckpt.when import Moment

#: The number of steps for the median duration; a median ignores an evaluation in between.
_STEPS = 15
#: The weight of a new measurement of a save against all earlier ones.
_WEIGHT = 0.5


class StepTiming:
    """The clock of a run.

    Args:
        clock: the present time in seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: int | None = None
        self._step: int | None = None
        self._previous: int | None = None
        #: When the calling thread left the last boundary.
        self._left = self._began
        self._idle: deque[float] = deque(maxlen=_STEPS)
        self._busy: deque[float] = deque(maxlen=_STEPS)
        self._stall: float | None = None
        self._durable: float | None = None

    def reach(self, step: int, *, in_flight: bool) -> None:
        """Record that training is at the boundary after ``step``; a repeated call changes nothing."""
        if step == self._step:
            return
        now = self._clock()
        if self._first is None:
            self._first = step
        elif self._step is not None and step > self._step:
            (self._busy if in_flight else self._idle).append((now - self._left) / (step - self._step))
        self._previous, self._step = self._step, step
        self._left = now

    def resume(self, step: int) -> None:
        """Record that training continues after ``step``, which is saved."""
        self._step = step
        self._left = self._began = self._clock()

    def begin(self) -> float:
        """Record that a save begins; returns the time, for :meth:`durable`."""
        self._began = self._clock()
        return self._began

    def leave(self) -> None:
        """Record that the calling thread returns to training."""
        self._left = self._clock()

    def durable(self, began: float, stall: float) -> None:
        """Record that the save that began at ``began`` is durable, and stalled training for ``stall`` seconds."""
        self._durable = _mean(self._durable, self._clock() - began)
        self._stall = _mean(self._stall, stall)

    def moment(self, *, in_flight: bool, measured: bool = True) -> Moment:
        """The inputs of policies at this boundary; policies that depend only on steps need no measurements."""
        step = self._step if self._step is not None else 0
        return Moment(
            step=step,
            previous=self._previous,
            first=step if self._first is None else self._first,
            since=self._clock() - self._began if measured else 0.0,
            in_flight=in_flight,
            step_seconds=self.step_seconds if measured else None,
            cost=self.cost if measured else None,
            durable_seconds=self._durable if measured else None,
        )

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step while nothing is saved; of any step if there was no such step yet."""
        return statistics.median(self._idle or self._busy) if self._idle or self._busy else None

    @property
    def cost(self) -> float | None:
        """Seconds of training that a save costs: the stall, and the slowdown of steps while it is written."""
        if self._stall is None or self._durable is None:
            return None
        slower = 0.0
        if self._idle and self._busy:
            idle, busy = statistics.median(self._idle), statistics.median(self._busy)
            slower = max(0.0, 1 - idle / busy) * max(0.0, self._durable - self._stall) if busy > 0 else 0.0
        return self._stall + slower


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
