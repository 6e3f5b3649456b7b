"""Stands in for the compiled core if there is none: Python prefers an extension module of this name.

It has the functions for reading, inspecting, verifying and converting. All other names exist, and raise if called.
"""

import sys
from importlib.metadata import version

from fastckpt._portable.checksum import crc64, crc64_joined
from fastckpt._portable.hashes import crowded
from fastckpt._portable.limits import MAX_DIMENSIONS, MAX_TOKENS
from fastckpt._portable.listing import list_checkpoints
from fastckpt._portable.reader import Mappings, Reader
from fastckpt._portable.records import (
    DamagedRange,
    ListedCheckpoint,
    LogicalType,
    ReadRequest,
    StoredShard,
    StoredTensor,
)
from fastckpt._portable.refusal import for_linux

__all__ = [
    "DEBUG_BUILD",
    "MAX_DIMENSIONS",
    "MAX_TOKENS",
    "MOST_THREADS",
    "PLAN",
    "DamagedRange",
    "Gathering",
    "Incoming",
    "Leftover",
    "ListedCheckpoint",
    "LogicalType",
    "Mail",
    "Mappings",
    "Memory",
    "Operation",
    "Probe",
    "ProbedFiles",
    "ProbedRing",
    "RankBase",
    "RankLoad",
    "RankSave",
    "ReadRequest",
    "Reader",
    "Replicas",
    "SaveOptions",
    "Share",
    "SingleFile",
    "Snapshot",
    "Spread",
    "StoredShard",
    "StoredTensor",
    "__version__",
    "aggregation",
    "begin_copy",
    "check_target",
    "counters_refused",
    "crc64",
    "crc64_joined",
    "crowded",
    "leftovers",
    "list_checkpoints",
    "probe",
    "process_token",
    "reads_process",
    "remove",
    "remove_leftover",
    "save",
    "set_changed",
    "set_group",
    "set_target",
    "try_nice",
    "wait_for",
    "warn",
]

__version__ = version("fastckpt-io")
DEBUG_BUILD = False
#: No limit: none of the core's threads run here.
MOST_THREADS = sys.maxsize
#: 0 means that there is no plan: ranks do not save or load together here.
PLAN = 0

Gathering = for_linux("Gathering")
Incoming = for_linux("Incoming")
Leftover = for_linux("Leftover")
Mail = for_linux("Mail")
Memory = for_linux("Memory")
Operation = for_linux("Operation")
Probe = for_linux("Probe")
ProbedFiles = for_linux("ProbedFiles")
ProbedRing = for_linux("ProbedRing")
RankBase = for_linux("RankBase")
RankLoad = for_linux("RankLoad")
RankSave = for_linux("RankSave")
Replicas = for_linux("Replicas")
SaveOptions = for_linux("SaveOptions")
Share = for_linux("Share")
SingleFile = for_linux("SingleFile")
Snapshot = for_linux("Snapshot")
Spread = for_linux("Spread")
aggregation = for_linux("aggregation")
check_target = for_linux("check_target")
leftovers = for_linux("leftovers")
probe = for_linux("probe")
process_token = for_linux("process_token")
reads_process = for_linux("reads_process")
remove = for_linux("remove")
remove_leftover = for_linux("remove_leftover")
save = for_linux("save")
set_changed = for_linux("set_changed")
set_group = for_linux("set_group")
set_target = for_linux("set_target")
try_nice = for_linux("try_nice")
wait_for = for_linux("wait_for")
warn = for_linux("warn")


def begin_copy(kind: str, path: str, step: int | None) -> None:
    """Do nothing: there are no live counters here."""


def counters_refused() -> None:
    """None: there is no reason to report."""
