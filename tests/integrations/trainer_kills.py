"""Kills trainings at random moments and starts them again, and holds what they leave against undisturbed ones.

    PYTHONPATH=tests python tests/integrations/trainer_kills.py --kills 200 --seed 1

Each run goes on until it ends by itself. ``--ranks 2`` takes two ranks, with FSDP2; ``--trl`` the command ``trl sft``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fine_tuning
import trainers

from harness import groups

# DeepSpeed: each Trainer imports it, which takes a third of a second.
MODULES = (
    "harness.member,transformers.trainer,transformers.models.llama.modeling_llama,accelerate,deepspeed,peft,lightning,"
    "torchdata.stateful_dataloader"
)
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


def forge(*more: str) -> Any:
    """Makes groups of processes that have imported transformers, and more."""
    env = {"FASTCKPT_TEST_HUGE": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return groups.forge(env={"FASTCKPT_TEST_IMPORT": ",".join([MODULES, *more]), **env})


class Hand:
    """Kills within a time that follows the machine's pace: a kill lets the next one come later, an end lets it sooner.

    Attributes:
        draw: what says when.
        longest: seconds.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self.draw, self.longest = random.Random(seed), longest

    def until_it_ends(
        self, libraries: groups.Forge, run: Callable[..., Any], folder: Path, ranks: int, **arguments: Any
    ) -> tuple[int, Any]:
        """Start a training again and again; how often it was killed, and what it leaves."""
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
            # One that has lost another rank may say so before its own end.
            if not any(one.kind == "died" for one in outcomes):
                raise AssertionError([one.raised and one.raised.trace for one in outcomes])
            kills, self.longest = kills + 1, 1.1 * self.longest


def campaign(
    libraries: groups.Forge, run: Callable[..., Any], place: Path, seed: int, ranks: int = 1, **arguments: Any
) -> Iterator[int]:
    """Trainings that are killed, one after another; yields the kills of each.

    Args:
        libraries: of :func:`forge`.
        run: the program, as :func:`trainers.train`.
        place: a folder for them.
        seed: what is drawn with.
        ranks: of each training.
        **arguments: of the program.

    Raises:
        AssertionError: one left something else than the undisturbed training, or could not go on.
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


def main() -> int:
    """Run the campaign, and print what comes of it."""
    parser = argparse.ArgumentParser(
        description="Kill trainings at random moments, and see whether they end all the same."
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--trl", action="store_true")
    options = parser.parse_args()
    kills = runs = 0
    with forge(*([TRL] if options.trl else [])) as libraries, tempfile.TemporaryDirectory() as folder:
        place, run, arguments = Path(folder), trainers.train, FSDP2 if options.ranks > 1 else {}
        if options.trl:
            fine_tuning.write_material(place)
            run, arguments = fine_tuning.tune, {"material": folder}
        for more in campaign(libraries, run, place, options.seed, options.ranks, **arguments):
            kills, runs = kills + more, runs + 1
            print(f"{runs} trainings, killed {kills} times: 0 wrong", flush=True)
            if kills >= options.kills:
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
