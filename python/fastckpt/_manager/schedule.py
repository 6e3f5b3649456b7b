"""Which policies want a step, and which of these each rank may evaluate by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastckpt import when as saving

if TYPE_CHECKING:
    from fastckpt.when import Policy

    from .step_timing import StepTiming


class Schedule:
    """The policies of ``save_when=``.

    Args:
        policies: a step is wanted if one of them wants it; without any, every step is wanted.
        timing: measures for the policies.

    Attributes:
        may_wait: whether a step that no policy wants by its number may pass without a round: not if there is a caller's
            own policy; a policy by time that wants the step wants the next one, too.
    """

    def __init__(self, policies: Sequence[Policy], timing: StepTiming) -> None:
        self.policies, self._timing = list(policies), timing
        self._by_step = [one for one in policies if _goes_by_step(one)]
        by_time = (saving.Every, saving.Continuously, saving.Auto)
        self.may_wait = all(type(one) in by_time or one in self._by_step for one in policies)

    def due(self, *, in_flight: bool) -> bool:
        """Whether the step is wanted."""
        moment = self._timing.moment(in_flight=in_flight)
        return not self.policies or any(policy.due(moment) for policy in self.policies)

    def due_by_step(self) -> bool:
        """Whether the step is wanted because of its number, which is the same on all ranks."""
        moment = self._timing.moment(in_flight=False, measured=False)
        return not self.policies or any(policy.due(moment) for policy in self._by_step)


def _goes_by_step(policy: Policy) -> bool:
    if type(policy) is saving.Every:
        return policy.steps is not None
    return type(policy) in {saving.Steps, saving.First}
