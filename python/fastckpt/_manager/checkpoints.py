"""The checkpoints of a run, on both tiers, with the reasons for which they stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt.keep import Policy

    from .directory import Directory
    from .remote import Remote
    from .tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedCheckpoint:
    """A checkpoint of a run, as :meth:`fastckpt.Manager.checkpoints` lists it.

    Attributes:
        step: its training step.
        path: its directory; where only the remote tier has it, its place there.
        created: when its save began, in seconds since 1970; None if it cannot be opened.
        metrics: the metrics that were saved with it.
        changed: of the groups ``model`` and ``optimizer``, the share of the bytes that are of tensors which differ from
            the checkpoint before; empty if unknown.
        kept_for: why it stays: the policies that keep it, ``pinned``, or another reason in words. Without one it is
            removed after the next save.
        pinned: whether it is pinned.
        tiers: where it is: ``local``, ``remote`` or both.
    """

    step: int
    path: str
    created: float | None
    metrics: Mapping[str, float]
    changed: Mapping[str, float]
    kept_for: tuple[str, ...]
    pinned: bool
    tiers: tuple[str, ...]


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
    looks = {name: tier.place.look() for name, (tier, _) in tiers.items()}
    found: dict[int, ManagedCheckpoint] = {}
    for name, (tier, deciding) in tiers.items():
        steps = [step for step in looks[name].steps if step not in found]
        entries, why = tier.catalogue.entries(steps), tier.kept(deciding) if steps else {}
        for step in steps:
            saved = entries[step].saved if step in entries else None
            found[step] = ManagedCheckpoint(
                step=step,
                path=tier.place.path_of(step),
                created=None if saved is None else saved.created,
                metrics={} if saved is None else saved.metrics,
                changed={} if saved is None else saved.changed,
                kept_for=("it cannot be opened",) if saved is None else tuple(why.get(step, ())),
                pinned=any(step in look.pinned for look in looks.values()),
                tiers=tuple(name for name, look in looks.items() if step in look.steps),
            )
    return [found[step] for step in sorted(found)]
