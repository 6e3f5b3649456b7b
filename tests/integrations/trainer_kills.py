"""Kills trainings at random moments, restarts them, and compares their results with undisturbed ones.

Each training is restarted until it ends by itself.
"""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from harness import groups

TRL = "datasets,trl.scripts.sft,trl.trainer.sft_trainer"
#: Each layer is spread over the ranks.
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}


class Hand:
    """Kills within a time that adapts to the machine: after a kill, the next kill comes later; after an end, sooner.

    Attributes:
        draw: the random generator that draws the times of kills.
        longest: the longest time to a kill, in seconds.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self.draw, self.longest = random.Random(seed), longest

    def until_it_ends(
        self, libraries: groups.Forge, run: Callable[..., Any], folder: Path, ranks: int, **arguments: Any
    ) -> tuple[int, Any]:
        """Start a training again and again until it ends; return the number of kills, and its results."""
        folder.mkdir(exist_ok=True)
        kills = 0
        while True:
            with libraries.group(ranks, backend="") as group:
                seconds = self.draw.uniform(0, self.longest)
                group.start(trainers.killed_after, seconds, run, str(folder), **arguments)
                outcomes = group.outcomes(240)
            if all(one.kind == "returned" for one in outcomes):
                self.longest *= 0.8
                return kills, outcomes[0].value
            # A rank that lost another rank may raise an error before it is killed.
            if not any(one.kind == "died" for one in outcomes):
                raise AssertionError([one.raised and one.raised.trace for one in outcomes])
            kills, self.longest = kills + 1, 1.1 * self.longest


def campaign(
    libraries: groups.Forge, run: Callable[..., Any], place: Path, seed: int, ranks: int = 1, **arguments: Any
) -> Iterator[int]:
    """Run trainings that are killed, one after another; yield the number of kills of each.

    Args:
        libraries: the result of :func:`forge`.
        run: the program, such as :func:`trainers.train`.
        place: the folder of the trainings.
        seed: the seed of the times of kills.
        ranks: the number of ranks of each training.
        **arguments: the arguments of the program.

    Raises:
        AssertionError: a training ended differently from the undisturbed one, or could not continue.
    """
    (place / "whole").mkdir()
    with libraries.group(ranks, backend="") as group:
        group.start(run, str(place / "whole"), **arguments)
        (whole, *_) = group.outcomes(240)
    found, hand = whole.value, Hand(seed, 1.2 * whole.seconds)
    for number in range(sys.maxsize):
        kills, left = hand.until_it_ends(libraries, run, place / str(number), ranks, **arguments)
        assert left == found, f"training {number} of seed {seed}: {json.dumps([left, found])}"
        yield kills
