"""What a manager saves and loads with: the functions for one process, or those that all ranks call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastckpt import distributed
from fastckpt._api.load import load
from fastckpt._api.per_rank import load_state_of
from fastckpt._api.save import save
from fastckpt._api.save_settings import SaveSettings
from fastckpt._api.settings import Settings
from fastckpt._background.save_async import save_async
from fastckpt._background.settings import BackgroundSettings
from fastckpt._ranks.calls import Call, marked
from fastckpt._ranks.replicas import Policy
from fastckpt._ranks.session import session

from .agreement import Ended

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .agreement import Alone

#: Seconds for which a rank that cannot take part in the first save waits for the others, to tell them.
_MEETING = 10.0
#: What the manager gives to a save itself.
_OWN = {"overwrite", "on_error"}


class Calls:
    """The functions of one manager.

    Args:
        options: ``save_options=``.
        ranks: arguments by which ``fastckpt.distributed`` finds the ranks; None for a process that is alone whatever
            there is.
        agree: those ranks.
        policy: what saves of several ranks are given beside, unless ``options`` say otherwise.

    Attributes:
        options: further arguments for each save.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None,
        ranks: Mapping[str, Any] | None,
        agree: Alone,
        policy: Mapping[str, str] | None = None,
    ) -> None:
        kinds: list[type[Settings]] = [SaveSettings, BackgroundSettings]
        kinds += [Policy] if agree.grouped else []
        known = {name for kind in kinds for name in kind.options()} - _OWN
        unknown = sorted(set(options or {}) - known)
        if unknown:
            raise ValueError(f"Manager: save_options: {', '.join(unknown)}: known are {', '.join(sorted(known))}")
        self.options = {**(policy or {}), **(options or {})} if agree.grouped else dict(options or {})
        self._ranks = ranks
        self._agree = agree

    def save(self, state: Any, path: str, per_rank: Any, how: Mapping[str, Any]) -> SaveReport:
        """Save at once; ``how`` may have arguments that only a save in the background takes."""
        if not self._agree.grouped and per_rank is None:
            return save(state, path, **_at_once(how))
        given = _at_once(how)
        return distributed.save(state, path, per_rank=per_rank, **self._to_ranks(), **given)

    def save_async(self, state: Any, path: str, per_rank: Any, how: Mapping[str, Any]) -> PendingSave:
        """Save in the background."""
        if not self._agree.grouped and per_rank is None:
            return save_async(state, path, **how)
        return distributed.save_async(state, path, per_rank=per_rank, **self._to_ranks(), **how)

    def miss(self, path: str, why: str) -> None:
        """Tell the others, which save together now, that this rank does not; it hardly waits for them."""
        ranks = self._to_ranks()
        found = session("save", ranks["process_group"])
        # Before the first save nobody knows who the others are: who leaves at once would not be heard.
        known = found.peers.has_met
        call = Call("save", found, path, ranks["timeout"] if known else min(_MEETING, ranks["timeout"]))
        error = Ended(why) if known else RuntimeError(why)
        # What this rank does with its own error, the caller decides.
        with contextlib.suppress(Exception, Ended), call.operation:
            raise error

    def load(self, path: str, how: Mapping[str, Any]) -> Any:
        """Load; the state and a report."""
        if not self._agree.grouped:
            return load(path, **{**how, "report": True})
        with marked(self._agree.answered):
            return distributed.load(path, **self._to_ranks(), **{**how, "report": True})

    def load_own(self, path: str, ranks: int) -> Any:
        """What this rank saved for itself, of so many ranks; None where there were not as many."""
        size = self._agree.size
        return load_state_of(path, None, (self._agree.rank, size)) if ranks == size else None

    def _to_ranks(self) -> Mapping[str, Any]:
        if self._ranks is None:
            raise ValueError("save: per_rank: the manager acts for this process alone: put it into the state")
        return self._ranks


def _at_once(how: Mapping[str, Any]) -> dict[str, Any]:
    """Without the arguments that only a save in the background takes."""
    only = BackgroundSettings.options()
    return {name: value for name, value in how.items() if name not in only}
