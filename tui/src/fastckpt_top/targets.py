"""The target of the storage: tiers and their parsing. Rates are bytes/s per GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fastckpt_top.segment import COPIES, Kind

_RATE: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*((?:[tgmk]i?)?b/s)?", re.ASCII)
_UNITS: Final = {
    "b/s": 1.0,
    **{f"{letter}b/s": 1e3**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib/s": 1024.0**power for power, letter in enumerate("kmgt", 1)},
}
_LEAST_BARE: Final = 1e4
"""A number below this without a unit is an error, because another unit must be meant."""

DEFAULT_TIER: Final = "light"
TIERS: Final[dict[str, tuple[float, float]]] = {
    "light": (0.75e9, 1e9),
    "medium": (1.5e9, 2e9),
    "high": (3e9, 4e9),
}
"""Tier -> bytes/s per GPU written and read (NVIDIA's sizing for DGX H100)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The targets of saves and loads.

    Attributes:
        save: Bytes/s per GPU; 0 for none.
        load: Bytes/s per GPU, for verifies too; 0 for none.
        name: The tier, or `custom`.
        source: The origin: `option`, `environment`, `process`, `default`, `key`.
    """

    save: float
    load: float
    name: str
    source: str

    def of(self, kind: int) -> float:
        """Bytes/s per GPU for a kind of operation; 0 for none."""
        return self.save if kind == Kind.SAVE else 0.0 if kind in COPIES else self.load


def tier(name: str, source: str) -> Target:
    """The target of a tier.

    Args:
        name: One of `TIERS`.
        source: The origin.
    """
    save, load = TIERS[name]
    return Target(save, load, name, source)


def named(save: float, load: float, source: str) -> Target:
    """A target from two figures, named after its tier if it is one.

    Args:
        save: Bytes/s per GPU.
        load: Bytes/s per GPU.
        source: The origin.
    """
    for name, pair in TIERS.items():
        if pair == (save, load):
            return Target(save, load, name, source)
    return Target(save, load, "custom", source)


def parse(text: str, source: str) -> Target:
    """Parse the user's text, as `fastckpt.tools.set_target` does: both pass `tests/data/targets.txt`.

    Args:
        text: `light`, `medium`, `high`, a rate per GPU for both directions, or `save=RATE,load=RATE` (either may be
            missing, which means no target), in upper or lower case. A rate is a number with a unit (`2.5GB/s`), or a
            number of bytes/s.
        source: The origin.

    Returns:
        The target.

    Raises:
        ValueError: The text has none of these forms; the message lists them.
    """
    word = text.strip().lower()
    if word in TIERS:
        return tier(word, source)
    if "=" not in word:
        value = _figure(word, text)
        return named(value, value, source)
    found = {"save": 0.0, "load": 0.0}
    for part in word.split(","):
        name, _, figure = part.partition("=")
        if name.strip() not in found:
            raise ValueError(_explain(text))
        found[name.strip()] = _figure(figure, text)
    return named(found["save"], found["load"], source)


def following(present: Target, asked: Target | None) -> Target:
    """The target after the current one, in a cycle of the tiers and the command line's target if that is not a tier."""
    round_ = [tier(name, "key") for name in TIERS]
    if asked is not None and asked.name not in TIERS:
        round_.append(asked)
    at = next((index for index, one in enumerate(round_) if one.name == present.name), -1)
    return round_[(at + 1) % len(round_)]


def _figure(word: str, text: str) -> float:
    found = _RATE.fullmatch(word.strip())
    value = 0.0 if found is None else float(found[1]) * _UNITS.get(found[2], 1.0)
    least = _LEAST_BARE if found is None or found[2] is None else 1.0
    if not least <= value < 1e18:  # noqa: PLR2004 - less is no byte, more is no storage
        raise ValueError(_explain(text))
    return value


def _explain(text: str) -> str:
    return f"{text!r} is not a target: give light, medium, high, a rate per GPU (2.5GB/s), or save=RATE,load=RATE"
