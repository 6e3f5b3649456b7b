"""The checkpoints that a restore tries, in order; and whether a run without checkpoints may start anew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fastckpt._api.manage import leftovers
from fastckpt._api.manage import list as listed
from fastckpt._warn import warn
from fastckpt.exceptions import CheckpointError, NotACheckpointError

from . import earlier_run, lineage
from .catalogue import FILE
from .directory import Directory

if TYPE_CHECKING:
    from .catalogue import Entry
    from .remote import Remote
    from .tier import Tier


class Candidate(NamedTuple):
    """A checkpoint that may be restored.

    A ``far`` checkpoint is in the remote tier; it ``differs`` if the local tier has a different save of the step.
    """

    step: int
    far: bool = False
    differs: bool = False


@dataclass(slots=True, eq=False)
class Candidates:
    """The checkpoints that may be restored, of the local tier and of the remote one.

    Attributes:
        highest_left: the highest step, if the last :meth:`look` found no checkpoint of the branch that saved last.
    """

    local: Tier[Directory]
    remote: Remote | None
    highest_left: int | None = None
    #: The steps for which the two tiers have different saves.
    _differing: set[int] = field(default_factory=set)

    @property
    def order(self) -> int:
        """The highest known order (:mod:`.lineage`) of any save, on either tier."""
        return max(tier.order for tier in (self.local, self.remote) if tier is not None)

    def look(self, *, needed: bool | None = None) -> list[Candidate]:
        """The checkpoints of the branch that saved last, in the order to try: by falling step, the local tier first.

        Raises:
            OSError: the remote tier does not answer, and is ``needed`` (None: only if the directory has no checkpoint).
        """
        here, aside = self._here()
        there, far = self._there(needed=not here if needed is None else needed)
        near = self.local.catalogue.entries(here, aside)
        tip = self.local.catalogue.tip(near)
        if self.remote is not None and far:
            tip = lineage.last([tip, self.remote.catalogue.tip(far)])

        def is_own(step: int, entries: Mapping[int, Entry]) -> bool:
            return step not in entries or not tip.has_left(step, entries[step].lineage)

        self._differing = {step for step in near.keys() & far if near[step].lineage.order != far[step].lineage.order}
        tries = [
            *(Candidate(step) for step in here if is_own(step, near)),
            *(Candidate(step, True, step in self._differing) for step in there if is_own(step, far)),
        ]
        self.highest_left = None if tries else max([*here, *there], default=None)
        return sorted(tries, key=lambda one: (-one.step, one.far))

    def candidates_of(self, step: int, *, needed: bool) -> list[Candidate]:
        """The checkpoints of a step to try, the local one first; if they differ, the one of the branch that saved last.

        A manager that may write reads both tiers: its saves must come after all existing ones. Others read no store.

        Raises:
            OSError: the remote tier does not answer, and is ``needed``.
        """
        if not self.local.read_only:
            own = [one for one in self.look(needed=needed) if one.step == step]
            if step in self._differing and len(own) == 1:
                return own
        return [Candidate(step), *([] if self.remote is None else [Candidate(step, True, step in self._differing)])]

    def is_gone(self, one: Candidate) -> bool:
        """Whether nothing of a checkpoint is left."""
        if not one.far:
            return not os.path.lexists(self.local.place.path_of(one.step))
        try:
            return self.remote is not None and one.step not in self.remote.place.look().steps
        except OSError:
            return False

    def refuse_new_beginning(self) -> None:
        """Refuse to start anew if there are traces of a run.

        Raises:
            CheckpointError: a run was here; NotACheckpointError if it was a run of another program.
        """
        if (step := self.highest_left) is not None:
            raise CheckpointError(
                f"restore: {self.local.place.path}: the run went back, and every checkpoint here is on a branch that "
                f"it left; the highest is step {step} (to go on from that one, call restore(step={step}); to start "
                "anew, call restore(fresh=True))"
            )
        for place in [self.local.place, *([] if self.remote is None else [self.remote.place])]:
            evidence = earlier_run.in_directory(place) if isinstance(place, Directory) else earlier_run.in_store(place)
            if evidence is None and place is self.local.place and self.local.catalogue.last.order:
                evidence = earlier_run.Evidence(f"{FILE} names a checkpoint that does not exist")
            if evidence is not None:
                kind = NotACheckpointError if evidence.is_foreign else CheckpointError
                raise kind(
                    f"restore: {place.path}: no checkpoint here has a name of this manager, but a run was here: "
                    f"{evidence.what} (to start anew, call restore(fresh=True))"
                )

    def _there(self, *, needed: bool) -> tuple[list[int], dict[int, Entry]]:
        """The steps of the remote tier, and their facts.

        Raises:
            OSError: the remote tier does not answer, and is ``needed``.
        """
        if self.remote is None:
            return [], {}
        try:
            steps = self.remote.place.look().steps
            entries = self.remote.catalogue.entries(steps)
        except OSError as error:
            if needed:
                raise
            warn(f"fastckpt: {self.remote.place.path} does not answer and is skipped: {error}")
            return [], {}
        return steps, entries

    def _here(self) -> tuple[list[int], list[int]]:
        """The steps of the local tier, and those whose directory a killed save moved aside to replace it.

        A load with the compiled core moves such a directory back.
        """
        directory = self.local.place
        steps, step_of = {*directory.look().steps}, directory.names.step_of
        try:
            left = {step_of(one.checkpoint) for one in leftovers(directory.path)} - steps - {None}
            # A full list opens every manifest, so it is made only if some leftover is of a step without a checkpoint
            # under its own name.
            aside = [one.name for one in listed(directory.path) if one.aside] if left else []
        except (FileNotFoundError, NotImplementedError):
            aside = []
        gone = [step for step in map(step_of, aside) if step is not None]
        return sorted({*steps, *gone}, reverse=True), gone
