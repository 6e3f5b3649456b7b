"""Places inside of fastckpt where tests make it fail, wait or tell: each is named here alone.

A name is ``module:attribute`` or ``module:Class.method``, also of the compiled core. :class:`harness.groups.Strike`
takes one for a rank, and :func:`replaced` for this process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

#: A rank writes its part of a save, and the first of them gives the whole its name.
WRITE = "fastckpt._core:RankSave.write"
COMMIT = "fastckpt._core:RankSave.commit"
#: The first creates the directory and its share of the files; the others join it, and allocate theirs.
CREATE, JOIN_SAVE = "fastckpt._core:RankSave.create", "fastckpt._core:RankSave.join"
ALLOCATE = "fastckpt._core:RankSave.allocate"
#: A rank learns of a base, compares with it, takes what is equal and follows what the others found.
KNOW, COMPARE = "fastckpt._core:RankBase.know", "fastckpt._core:RankBase.compare"
TAKE, FOLLOW = "fastckpt._core:RankBase.take", "fastckpt._core:RankBase.follow"
PASS_BASE_ON = "fastckpt._ranks.reuse:passed_on"
#: Bytes travel: a rank joins the exchange, sends to all, and makes the group for it. It finds out whether it can read
#: the memory of another one, and has others of its host read its own.
JOIN = "fastckpt._ranks.exchange:Exchange.join"
DATA_GROUP = "fastckpt._ranks.torch_distributed:DataGroup"
BROADCAST = f"{DATA_GROUP}.broadcast"
CONNECT = "fastckpt._ranks.torch_distributed:_new_gloo"
READS, SHARE = "fastckpt._core:reads_process", "fastckpt._ranks.process_group:share_memory"
#: A rank reads: all that it wants, its parts of the files, a part of an object in a store.
READ, READ_PARTS = "fastckpt._ranks.load:_read", "fastckpt._core:RankLoad.read"
READ_OBJECT = "fastckpt._stores.objects:Objects.read"
#: Ranks agree over the store, and the managers of all ranks ask each other.
PEERS, SERVE = "fastckpt._ranks.peers", "fastckpt._ranks.store:Transport.serve"
TAKE_NUMBER = "fastckpt._ranks.protocol:Turn.take_number"
LOOK_FOR_ANSWERS = "fastckpt._ranks.protocol:Turn._take"
ASK = "fastckpt._manager.crew:Crew.decide"
#: torch.distributed.checkpoint writes by fastckpt; whether its executor is prepared for our writers.
DCP_WRITE, PREPARED = "fastckpt.dcp._together:Together.write", "fastckpt.dcp._install:_prepared"
#: A copy between the tiers of a run: from the local one to the remote, and back.
DRAIN, FETCH = "fastckpt._manager.drain:copy_checkpoint", "fastckpt._manager.remote:copy_checkpoint"
#: Seconds for which the first process waits for files that others copy.
PATIENCE = "fastckpt._copy.shares:PATIENCE"
#: A run: an older checkpoint is removed, all that no policy wants is, copies begin or are taken up or given up, and the
#: end of a block is waited for.
REMOVE, RETENTION = "fastckpt._manager.directory:remove", "fastckpt._manager.tier:Tier.clear"
BEGIN_DRAIN, RESUME_DRAIN = "fastckpt._manager.drain:Drain.start", "fastckpt._manager.drain:Drain.resume"
LEAVE_DRAIN = "fastckpt._manager.drain:Drain.leave"
COMPLETE = "fastckpt._manager.completion:Completion.wait"
#: The facts about a checkpoint are read from it.
READ_FACTS = "fastckpt._manager.catalogue:read"
#: A restore reads the metadata, loads the state, and verifies the whole checkpoint before that.
OPEN_TO_RESTORE, LOAD_TO_RESTORE = "fastckpt._manager.restore:metadata_of", "fastckpt._manager.restore:load_alone"
VERIFY_TO_RESTORE = "fastckpt._manager.restore:verify"
#: The table of mounts that the machine has.
MOUNTS = "fastckpt._manager.earlier_run:_MOUNTS"
#: A save in the background: it is looked at where it goes, admitted among the others, given memory, and its bytes are
#: copied; a step waits for it.
CHECK_TARGET, MEMORY = "fastckpt._core:check_target", "fastckpt._core:Memory"
ADMIT, WAIT_FOR_PATHS = "fastckpt._api.in_flight:admit", "fastckpt._api.in_flight:wait_for_paths"
STAGE, START = "fastckpt._background.staging:Staging.begin", "fastckpt._background.save_async:Job.start"
COPY_OUT, ENQUEUE = "fastckpt._tensors.memory:copy_out", "fastckpt._tensors.movers:Sources.enqueue"
WAIT_FOR_COPY = "fastckpt._background.gate:Gate.wait"
WAIT_FOR_EVENT = "fastckpt._api.event:Event.wait"
HOLD_STEPS, HOLD_STREAMS = "fastckpt._background.guard:hold_steps", "fastckpt._tensors.movers:Copies.hold_streams"
#: Bytes go from a device and to it.
FILL, PUT = "fastckpt._tensors.movers:Sources.fill", "fastckpt._tensors.movers:Sinks.drain"
CUT_FOR_DEVICE = "fastckpt._tensors.device:Download.parts"
PROTECT = "fastckpt._tensors.device:_protect"
#: Its snapshot is written, and who waits for it is told of the end.
WRITE_SNAPSHOT = "fastckpt._core:Snapshot.save"
TELL_OF_END = "fastckpt._background.pending:PendingSave._call_back"
#: A niceness is tried; which ones were.
TRY_NICE, TRIED_NICE = "fastckpt._core:try_nice", "fastckpt._background.nice:_tried"
#: What ``import`` starts the child by that looks at a file of torch's.
LOOK = "fastckpt._tools.convert.pickled:subprocess"
#: A file of safetensors is opened, and its tensors are compared with their checksums.
OPEN_TENSORS = "fastckpt.integrations.safetensors:_open"
CHECK_TENSORS = "fastckpt.integrations.safetensors:_File._check"
#: What the page for the monitor is told of.
WARN = "fastckpt._core:warn"


def replace(where: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``make(real)`` in the place of what is there; what puts it back."""
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
        # A class of the compiled core: who makes one is given a stand-in whose method is in the way.
        return _stand_in(importlib.import_module(module), owner, name, made)
    return functools.partial(setattr, owner, name, real)


@contextlib.contextmanager
def replaced(where: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Have ``make(real)`` in the place of what is there for as long as the block lasts."""
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
