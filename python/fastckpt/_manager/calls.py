"""What a manager saves and loads with: the functions for one process, or those that all ranks call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastckpt import distributed
from fastckpt._api.load import load
from fastckpt._api.per_rank import load_state_of
from fastckpt._api.save import save
from fastckpt._api.save_settings import SaveSettings
from fastckpt._api.settings import Settings
from fastckpt._background.save_async import save_async
from fastckpt._background.settings import BackgroundSettings, CopySettings
from fastckpt._ranks.calls import marked
from fastckpt._ranks.replicas import Policy

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .ranks import Ranks

#: What the manager gives to a save itself.
_OWN = {"overwrite", "on_error"}


class Calls:
    """The functions of one manager.

    Args:
        options: ``save_options=``.
        ranks: who saves and loads.
        policy: what saves of several ranks are given beside, unless ``options`` say otherwise.
    """

    def __init__(self, options: Mapping[str, Any] | None, ranks: Ranks, policy: Mapping[str, str]) -> None:
        kinds: list[type[Settings]] = [SaveSettings]
        kinds += [CopySettings, Policy] if ranks.grouped else [BackgroundSettings]
        known = {name for kind in kinds for name in kind.options()} - _OWN
        unknown = sorted(set(options or {}) - known)
        if unknown:
            raise ValueError(f"Manager: save_options: {', '.join(unknown)}: known are {', '.join(sorted(known))}")
        self.options = {**(policy if ranks.grouped else {}), **(options or {})}
        self._ranks = ranks

    def save(self, state: Any, path: str, per_rank: Any, how: Mapping[str, Any]) -> SaveReport:
        """Save at once; ``how`` may have arguments that only a save in the background takes."""
        given = {name: value for name, value in how.items() if name not in BackgroundSettings.options()}
        if not self._ranks.grouped and per_rank is None:
            return save(state, path, **given)
        return distributed.save(state, path, per_rank=per_rank, **self._ranks.arguments, **given)

    def save_async(self, state: Any, path: str, per_rank: Any, how: Mapping[str, Any]) -> PendingSave:
        """Save in the background."""
        if not self._ranks.grouped and per_rank is None:
            return save_async(state, path, **how)
        return distributed.save_async(state, path, per_rank=per_rank, **self._ranks.arguments, **how)

    def load(self, path: str, how: Mapping[str, Any]) -> Any:
        """Load; the state and a report."""
        if not self._ranks.grouped:
            return load(path, **{**how, "report": True})
        with marked(self._ranks.answered):
            return distributed.load(path, **self._ranks.arguments, **{**how, "report": True})

    def load_own(self, path: str, ranks: int) -> Any:
        """What this rank saved for itself, of so many ranks; None where there were not as many."""
        size = self._ranks.size
        return load_state_of(path, None, (self._ranks.rank, size)) if ranks == size else None
