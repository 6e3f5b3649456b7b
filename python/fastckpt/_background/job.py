"""What an asynchronous save of one process does between the call and the durable checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt import _core
from fastckpt._api.single_process import FromSnapshot, SingleProcess
from fastckpt._api.write import Agreed, core_options

from .background_save import BackgroundSave

if TYPE_CHECKING:
    from fastckpt._api.save_request import SaveRequest

    from .pending import PendingSave
    from .settings import BackgroundSettings


class Job(BackgroundSave):
    """Its snapshot holds the files, which are laid out at the call."""

    def __init__(self, pending: PendingSave, request: SaveRequest, settings: BackgroundSettings) -> None:
        flat = request.flat
        agreed = SingleProcess().agree(request)
        options = core_options(request, agreed)
        snapshot = _core.Snapshot(flat.tensors, agreed.structure, agreed.metadata, options, agreed.fill)
        super().__init__(pending, request, snapshot, settings, lazy=settings.lazy)
        self.group = FromSnapshot(Agreed(prefix=agreed.prefix, frozen=agreed.frozen), snapshot)
        # Texts by the hundred thousand are freed here, on the caller's time: a background thread would hold the GIL.
        flat.tokens.clear()
        flat.tensors.clear()
