"""Rooms of fastckpt that tests look into, or change: the one place that names those that move."""

import time

from fastckpt._api.save_request import build_request
from fastckpt._api.save_settings import SaveSettings
from fastckpt._background.save_async import Job
from fastckpt._background.staging import Staging
from fastckpt._ranks import process_group
from fastckpt._ranks.agreement import Agreement
from fastckpt._ranks.background import Job as RanksJob
from fastckpt._ranks.process_group import AgreedByRanks
from fastckpt._tensors.spreads import Spreads

__all__ = ["AgreedByRanks", "Agreement", "Job", "RanksJob", "Staging", "local_of", "process_group"]


def local_of(state, rank, ranks, *, per_rank=None, metadata=None, **options):
    """What a rank brings to a save, described, before any other has heard of it: its part of the agreement."""
    settings = SaveSettings.of("save", options)
    spreads = Spreads(ranks, rank)
    request = build_request(
        "save", "/c", state, metadata, settings, began=time.perf_counter(), per_rank=per_rank, spreads=spreads
    )
    return Agreement(request, rank, len(ranks))
