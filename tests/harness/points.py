"""Places inside fastckpt at which tests make it fail, wait or report: only this file names them.

A place is ``module:attribute`` or ``module:Class.method``, also in the compiled core. :class:`harness.groups.Strike`
uses a place in a rank, and :func:`replaced` in this process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

#: A rank writes its part of a save, and rank 0 publishes the checkpoint.
WRITE = "fastckpt._core:RankSave.write"
COMMIT = "fastckpt._core:RankSave.commit"
#: Rank 0 creates the workspace and allocates its files; the other ranks join the save and allocate theirs.
CREATE, JOIN_SAVE = "fastckpt._core:RankSave.create", "fastckpt._core:RankSave.join"
ALLOCATE = "fastckpt._core:RankSave.allocate"
#: A rank is given a base, compares its tensors with it, takes what is equal, and follows the others' results.
KNOW, COMPARE = "fastckpt._core:RankBase.know", "fastckpt._core:RankBase.compare"
TAKE, FOLLOW = "fastckpt._core:RankBase.take", "fastckpt._core:RankBase.follow"
PASS_BASE_ON = "fastckpt._ranks.reuse:passed_on"
#: A rank joins the exchange of bytes, sends to all, and makes the group for the exchange. It tests whether it can read
#: the memory of another rank, and lets ranks of its host read its own memory.
JOIN = "fastckpt._ranks.exchange:Exchange.join"
DATA_GROUP = "fastckpt._ranks.torch_distributed:DataGroup"
BROADCAST = f"{DATA_GROUP}.broadcast"
CONNECT = "fastckpt._ranks.torch_distributed:_new_gloo"
READS, SHARE = "fastckpt._core:reads_process", "fastckpt._ranks.process_group:share_memory"
#: A rank reads all that it needs, its parts of the files, or a part of an object in a store.
READ, READ_PARTS = "fastckpt._ranks.load:_read", "fastckpt._core:RankLoad.read"
READ_OBJECT = "fastckpt._stores.objects:Objects.read"
#: Ranks agree through the store, and the managers of all ranks decide together.
PEERS, SERVE = "fastckpt._ranks.peers", "fastckpt._ranks.store:Transport.serve"
TAKE_NUMBER = "fastckpt._ranks.protocol:Turn.take_number"
LOOK_FOR_ANSWERS = "fastckpt._ranks.protocol:Turn._take"
ASK = "fastckpt._manager.crew:Crew.decide"
#: torch.distributed.checkpoint writes with fastckpt; a flag records whether its executor is prepared for our writers.
DCP_WRITE, PREPARED = "fastckpt.dcp._together:Together.write", "fastckpt.dcp._install:_prepared"
#: A copy of a checkpoint from the local tier to the remote tier, and back.
DRAIN, FETCH = "fastckpt._manager.drain:copy_checkpoint", "fastckpt._manager.remote:copy_checkpoint"
#: The seconds for which the first process waits for files that others copy.
PATIENCE = "fastckpt._copy.shares:PATIENCE"
#: A manager removes an older checkpoint, or all that no policy keeps; it begins, resumes or abandons copies, and waits
#: for its background work.
REMOVE, RETENTION = "fastckpt._manager.directory:remove", "fastckpt._manager.tier:Tier.clear"
BEGIN_DRAIN, RESUME_DRAIN = "fastckpt._manager.drain:Drain.start", "fastckpt._manager.drain:Drain.resume"
LEAVE_DRAIN = "fastckpt._manager.drain:Drain.leave"
COMPLETE = "fastckpt._manager.completion:Completion.wait"
#: A manager reads the facts about a checkpoint from its files.
READ_FACTS = "fastckpt._manager.catalogue:read"
#: A restore reads the metadata, loads the state, and verifies the whole checkpoint before that.
OPEN_TO_RESTORE, LOAD_TO_RESTORE = "fastckpt._manager.restore:metadata_of", "fastckpt._manager.restore:load_alone"
VERIFY_TO_RESTORE = "fastckpt._manager.restore:verify"
#: The path of the machine's table of mounts.
MOUNTS = "fastckpt._manager.earlier_run:_MOUNTS"
#: A save in the background checks its target path, is admitted among the others, gets memory, and copies its bytes; an
#: optimizer step waits for the copy.
CHECK_TARGET, MEMORY = "fastckpt._core:check_target", "fastckpt._core:Memory"
ADMIT, WAIT_FOR_PATHS = "fastckpt._api.in_flight:admit", "fastckpt._api.in_flight:wait_for_paths"
STAGE, START = "fastckpt._background.staging:Staging.begin", "fastckpt._background.save_async:Job.start"
COPY_OUT, ENQUEUE = "fastckpt._tensors.memory:copy_out", "fastckpt._tensors.movers:Sources.enqueue"
WAIT_FOR_COPY = "fastckpt._background.gate:Gate.wait"
WAIT_FOR_EVENT = "fastckpt._api.event:Event.wait"
HOLD_STEPS, HOLD_STREAMS = "fastckpt._background.guard:hold_steps", "fastckpt._tensors.movers:Copies.hold_streams"
#: Bytes are copied from a device and to it.
FILL, PUT = "fastckpt._tensors.movers:Sources.fill", "fastckpt._tensors.movers:Sinks.drain"
CUT_FOR_DEVICE = "fastckpt._tensors.device:Download.parts"
PROTECT = "fastckpt._tensors.device:_protect"
#: A snapshot is written, and the callbacks of the pending save are called.
WRITE_SNAPSHOT = "fastckpt._core:Snapshot.save"
TELL_OF_END = "fastckpt._background.pending:PendingSave._call_back"
#: A niceness is tried, and the set of the values that were tried.
TRY_NICE, TRIED_NICE = "fastckpt._core:try_nice", "fastckpt._background.nice:_tried"
#: The module through which ``import`` starts the child that examines a file of torch.
LOOK = "fastckpt._tools.convert.pickled:subprocess"
#: A safetensors file is opened, and its tensors are compared with their checksums.
OPEN_TENSORS = "fastckpt.integrations.safetensors:_open"
CHECK_TENSORS = "fastckpt.integrations.safetensors:_File._check"
#: A warning is written to the page for the monitor.
WARN = "fastckpt._core:warn"


def replace(where: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the object ``real`` at ``where`` by ``make(real)``, and return the function that restores it."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    real = getattr(owner, name)
    made = make(real)
    try:
        setattr(owner, name, made)
    except TypeError:
        # A class of the compiled core cannot be changed: a stand-in class with the other method replaces it.
        return _stand_in(importlib.import_module(module), owner, name, made)
    return functools.partial(setattr, owner, name, real)


@contextlib.contextmanager
def replaced(where: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the object ``real`` at ``where`` by ``make(real)`` during the ``with`` statement."""
    undo = replace(where, make)
    try:
        yield
    finally:
        undo()


def _stand_in(module: Any, owner: type, name: str, made: Callable[..., Any]) -> Callable[[], None]:
    class StandIn:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._real = owner(*args, **kwargs)

        def __getattr__(self, attribute: str) -> Any:
            return functools.partial(made, self._real) if attribute == name else getattr(self._real, attribute)

    setattr(module, owner.__name__, StandIn)
    return functools.partial(setattr, module, owner.__name__, owner)
