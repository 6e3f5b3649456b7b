"""The checkpoints of a run, on both tiers, with the reasons for which they stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fastckpt.keep import Policy, Saved

    from .directory import Directory
    from .remote import Remote
    from .tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedCheckpoint:
    """A checkpoint of a run, as :meth:`fastckpt.Manager.checkpoints` lists it.

    If the tiers have different saves of its step, the facts are those of the local one, unless it cannot be opened.

    Attributes:
        step: its training step.
        path: its directory, or its place on the remote tier if only that tier has it.
        created: when its save began, in seconds since 1970; None if it cannot be opened.
        metrics: the metrics that were saved with it.
        changed: for the groups ``model`` and ``optimizer``, the share of the bytes in tensors that differ from the
            previous checkpoint; empty if unknown.
        kept_for: for each tier that has it, ``local`` or ``remote``, why it stays there: the policies that keep it,
            ``pinned``, or another reason in words. Without a reason, that tier removes it after the next save.
        pinned: whether it is pinned.
    """

    step: int
    path: str
    created: float | None
    metrics: Mapping[str, float]
    changed: Mapping[str, float]
    kept_for: Mapping[str, tuple[str, ...]]
    pinned: bool

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that have it: ``local``, ``remote`` or both."""
        return (*self.kept_for,)


def checkpoints_of(
    local: Tier[Directory], remote: Remote | None, policies: Sequence[Policy]
) -> list[ManagedCheckpoint]:
    """All checkpoints by rising step; ``policies`` decide on the local tier.

    Raises:
        OSError: the remote tier does not answer.
    """
    tiers: dict[str, tuple[Tier[Any], Sequence[Policy]]] = {"local": (local, policies)}
    if remote is not None:
        tiers["remote"] = (remote, remote.policies)
    paths: dict[int, str] = {}
    saved: dict[int, Saved] = {}
    kept: dict[int, dict[str, tuple[str, ...]]] = {}
    held: set[int] = set()
    for name, (tier, deciding) in tiers.items():
        # One listing, so that the decisions concern the listed checkpoints.
        steps, pinned = tier.place.look()
        entries = tier.catalogue.entries(steps)
        why = tier.reasons(entries, deciding, pinned)
        held |= pinned
        for step in steps:
            paths.setdefault(step, tier.place.path_of(step))
            kept.setdefault(step, {})[name] = tuple(why.get(step, (*_pinned(step, pinned), "it cannot be opened")))
            if step in entries:
                saved.setdefault(step, entries[step].saved)
    return [
        ManagedCheckpoint(
            step=step,
            path=path,
            created=None if (facts := saved.get(step)) is None else facts.created,
            metrics={} if facts is None else facts.metrics,
            changed={} if facts is None else facts.changed,
            kept_for=kept[step],
            pinned=step in held,
        )
        for step, path in sorted(paths.items())
    ]


def _pinned(step: int, pinned: Collection[int]) -> tuple[str, ...]:
    return ("pinned",) if step in pinned else ()
