"""One promise, and its trials."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIERS = ("fast", "nightly")
#: The name of the detail that counts the distinct states among all states that a run drew.
DISTINCT = "states that differ"


class EnoughError(Exception):
    """A part has so many violations that more trials would add nothing."""


@dataclass(frozen=True)
class Row:
    """A row of the campaign.

    Attributes:
        number: the number of the promise in the table.
        name: the name of the row, which is unique.
        promise: the promise, as a sentence.
        fault: the injected fault.
        control: the proof that the fault happens, and that the trial would notice a violation.
        run: the function that makes the trials of a :class:`Run`.
        fast: the number of trials of the fast tier.
        nightly: the number of trials of the nightly tier, which are made in parts.
        part: the number of trials of a part; a resumed campaign repeats a part that was interrupted.
        mutants: the mutants that the row must catch.
        tried: the number of trials within which a mutant must be caught.
        root: whether the trials need root.
        tests: the test files of the row, with names after ``::``. The gate runs these tests, too.
        drawn: whether the tests draw their trials at random; otherwise the trials are all cases.
    """

    number: int
    name: str
    promise: str
    fault: str
    control: str
    run: Callable[[Run], None]
    fast: int
    nightly: int
    part: int = 0
    mutants: tuple[str, ...] = ()
    tried: int = 0
    root: bool = False
    tests: tuple[str, ...] = ()
    drawn: bool = False

    def parts(self, tier: str) -> list[int]:
        """Return the number of trials of each part."""
        trials = self.fast if tier == "fast" else self.nightly
        size = self.part or trials or 1
        return [min(size, trials - at) for at in range(0, trials, size)]


@dataclass
class Run:
    """A part of a row while it runs.

    Attributes:
        tier: the tier of trials.
        seed: the seed of all draws.
        trials: the number of trials.
        place: an empty directory.
        most: the number of violations after which the part ends.
    """

    tier: str
    seed: int
    trials: int
    place: Path
    most: int = 10
    made: int = 0
    violations: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    told: float = field(default_factory=time.monotonic)

    @property
    def draw(self) -> random.Random:
        """Return a new random generator, determined by the seed."""
        return random.Random(self.seed)

    def done(self, wrong: str = "", trials: int = 1) -> None:
        """Count a trial; ``wrong`` is its violation, or an empty string.

        Raises:
            EnoughError: this is the last allowed violation.
        """
        self.made += trials
        if wrong:
            self.violations.append(wrong)
            print(f"    VIOLATION: {wrong}", file=sys.stderr, flush=True)
            if len(self.violations) >= self.most:
                raise EnoughError
        if time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            print(f"    {self.made} of {self.trials} trials", file=sys.stderr, flush=True)

    def count(self, what: str, number: float = 1) -> None:
        """Add a number to a detail of the result."""
        self.details[what] = self.details.get(what, 0) + number
