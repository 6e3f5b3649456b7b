"""One promise, and how it is tried."""

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
#: The detail of a run that counts the states, among those that its trials have drawn, that were not there before.
DISTINCT = "states that differ"


class EnoughError(Exception):
    """So much went wrong that the rest of the trials would tell nothing more."""


@dataclass(frozen=True)
class Row:
    """A row of the campaign.

    Attributes:
        number: of the promise in the table.
        name: of the row, unique.
        promise: what is promised, in a sentence.
        fault: what is injected.
        control: what shows that the fault comes, and that the trial would notice.
        run: makes the trials of a :class:`Run`.
        fast: trials of the fast tier.
        nightly: those of the nightly tier; they are made in parts.
        part: trials of a part, which is what a campaign repeats if it was stopped.
        mutants: those that the row must catch.
        tried: trials in which a mutant must be caught.
        root: whether only root can make the trials.
        tests: files of tests that the row is, with names after ``::``. The gate runs them by themselves.
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

    def parts(self, tier: str) -> list[int]:
        """The trials of each part."""
        trials = self.fast if tier == "fast" else self.nightly
        size = self.part or trials or 1
        return [min(size, trials - at) for at in range(0, trials, size)]


@dataclass
class Run:
    """A part of a row under way.

    Attributes:
        tier: which one.
        seed: what is drawn with.
        trials: how many to make.
        place: an empty directory.
        most: violations after which it ends.
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
        """A new source of what is drawn, by the seed alone."""
        return random.Random(self.seed)

    def done(self, wrong: str = "", trials: int = 1) -> None:
        """A trial has ended; ``wrong``: what it has found.

        Raises:
            EnoughError: that was the last violation that is wanted.
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
        """Add to a detail of the result."""
        self.details[what] = self.details.get(what, 0) + number
