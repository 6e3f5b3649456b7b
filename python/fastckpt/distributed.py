"""All processes of a job save and load one checkpoint, without gathering it in one place.

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}   # DTensors and all
fastckpt.distributed.save(state, "step-1000")            # called by every rank; the same files as one process writes
fastckpt.distributed.load("step-1000", into=state)       # on any number of ranks
model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); step = state["step"]

``into=`` is updated in place and returned: tensors are filled, and values such as the step are replaced. A module or an
optimizer may take the place of its state: it is loaded with that state.

The ranks coordinate through the store of torch's process group, and send each other bytes through a separate gloo
group; torch's collectives are not used, so training can continue meanwhile. Without a process group, the process saves
and loads by itself.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastckpt._api import in_flight
from fastckpt._api.io import give_report
from fastckpt._api.load_settings import LoadOptions, LoadSettings
from fastckpt._api.outcome import Attempt, conclude
from fastckpt._api.per_rank import load_state_of
from fastckpt._api.progress import ticker
from fastckpt._api.reports import SaveReport
from fastckpt._api.save import warn_of_failures
from fastckpt._api.save_request import build_request
from fastckpt._api.save_settings import SaveOptions, SaveSettings
from fastckpt._api.settings import takes
from fastckpt._api.write import write
from fastckpt._background.pending import PendingSave
from fastckpt._background.save_async import tell_unasked_but
from fastckpt._paths import AnyPath
from fastckpt._ranks.background import Job
from fastckpt._ranks.calls import Call
from fastckpt._ranks.load import load_on_ranks
from fastckpt._ranks.process_group import ProcessGroup
from fastckpt._ranks.ranks import Ranks, check_ranks
from fastckpt._ranks.session import session
from fastckpt._state.registry import Registry
from fastckpt._tensors.ranges import range_of
from fastckpt._tensors.rank_part import Part
from fastckpt._tensors.spreads import Spreads

__all__ = ["Part", "Ranks", "load", "load_per_rank", "save", "save_async"]

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(SaveSettings, like={SaveSettings: "fastckpt.save"}, ranks=True)
def save(
    state: Any,
    path: AnyPath,
    *,
    ranks: Any = None,
    per_rank: Any = None,
    metadata: Any = None,
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Write the state of all ranks to the directory ``path``; every rank of the group calls it.

    When it returns on any rank, the checkpoint is durable and whole. Until then the final name keeps its old contents,
    even if ranks fail. The files equal those that :func:`fastckpt.save` writes for the same state in one process, to
    the last byte of every shard: they depend neither on the number of ranks nor on how tensors are spread.

    Args:
        state: as for :func:`fastckpt.save`. It may also hold DTensors, ShardedTensors and :class:`Part` objects, of
            which each rank writes its own elements. Tensors and values that several ranks have must be equal on them
            (see :class:`Ranks`), and these ranks share the work. Mappings may have keys that only some ranks have, as
            with pipeline stages. The state must not change meanwhile.
        path: the checkpoint's directory, the same on all ranks, on a file system that all of them share.
        ranks: the ranks that save together: a process group of ``torch.distributed``, None for the default one, or a
            :class:`Ranks`, with a timeout and how copies of a tensor are compared.
        per_rank: a separate state of this rank: random states, the position of a data loader. This state has no tensors
            that are spread over ranks. :func:`load_per_rank` returns it.
        metadata: the coordinator's is written; other ranks may pass none, or a different one, except for ``step``.
        {options}

    ``dtype`` and ``exclude`` must be the same on all ranks, too. The coordinator's ``files`` are written. A pattern
    must match something on at least one rank. A ``base`` may have been written by any number of ranks, with any
    sharding, or by one process: each rank compares its own part, without sending tensor data.

    Returns:
        The report: ``bytes`` counts this rank's bytes, ``bytes_total`` those of all ranks; ``linked_bytes`` is for the
        whole checkpoint.

    Raises:
        RanksError: another rank failed, or made no progress for ``timeout`` seconds: ``failures`` names the ranks,
            their hosts and what happened there. Nothing was committed, unless the message says that the outcome is
            unknown.
        UnsupportedTypeError: the state, the metadata or ``per_rank`` holds a value that cannot be stored.
        ValueError: tensors or values that must be equal differ between ranks; or an argument is out of range, ``path``
            is a URL, or this process is not in the process group.
        FileExistsError: ``path`` exists and is not a checkpoint (for example, another program wrote it), or it is one
            and ``overwrite`` is false.
        OSError: the storage failed, on this rank; or ``path`` is not on a file system that all hosts share.
        TypeError: ``ranks`` is not a process group, or an argument is unknown.
        RuntimeError: this thread is already in a save or load of the group, which a signal handler has interrupted; or
            this process was forked from a rank.

    Warns:
        RuntimeWarning: as for :func:`fastckpt.save`.

    Example:
        >>> import fastckpt.distributed, torch
        >>> _ = fastckpt.distributed.save({"w": torch.ones(2)}, "step-7")  # every rank of the job
        >>> fastckpt.load("step-7")  # one process, anywhere
        {'w': tensor([1., 1.])}
    """
    began = time.perf_counter()
    together = check_ranks("save", ranks)
    call = Call("save", session("save", together.process_group), path, together.timeout)
    with range_of("fastckpt.distributed.save"), Attempt("save", call.path), call.operation:
        call.check()
        settings = SaveSettings.of("save", options, save)
        group = ProcessGroup(call.session, call.operation, together)
        spreads = Spreads(call.session.group.ranks, call.session.group.rank)
        with closing(
            build_request("save", call.path, state, metadata, settings, began=began, per_rank=per_rank, spreads=spreads)
        ) as request:
            call.mark(request.step, state if settings.exclude is None else None)
            in_flight.wait_for_paths(call.path, request.base)
            with ticker("save", call.path, shown=settings.io.progress) as progress:
                report = write(request, group, progress)
    conclude(report)
    warn_of_failures()
    give_report(settings.io, report)
    return report


@takes(SaveSettings, like={SaveSettings: "save"}, ranks=True)
def save_async(
    state: Any,
    path: AnyPath,
    *,
    ranks: Any = None,
    per_rank: Any = None,
    metadata: Any = None,
    **options: Unpack[SaveOptions],
) -> PendingSave:
    """Write the state of all ranks in the background; the state of this rank may change when this returns.

    The part of this rank is copied to host memory (later with ``IO(lazy=True)``); everything else happens in a thread:
    agreement with the other ranks, writing, and the commit. Every rank of the group calls it, in the same order
    relative to other saves and loads of the group. These wait for this save on every rank; only the copy of another
    asynchronous save need not wait, with ``IO(max_in_flight=...)``. Saves of several groups run in parallel, in any
    order. Each save in flight needs memory for one copy of this rank's part; it is kept for the next save (see
    :func:`fastckpt.background.release_buffers`). The process does not end before the checkpoint is durable, or has
    failed.

    Args:
        state: as for :func:`save`.
        path: as for :func:`save`.
        ranks: as for :func:`save`.
        per_rank: as for :func:`save`.
        metadata: as for :func:`save`.
        {options}

    The call reads the contents of ``files``. The copy is compared with ``base`` and with other ranks in the background.

    Returns:
        A handle on the save, like that of :func:`fastckpt.save_async`: ``result()`` waits until the checkpoint is
        durable on all ranks, and returns a :class:`fastckpt.types.SaveReport`. A save that one rank cancels fails on
        all.

    Raises:
        UnsupportedTypeError: the state, the metadata or ``per_rank`` holds a value that cannot be stored. This and all
            later errors fail the save on the other ranks.
        Exception: an earlier asynchronous save failed, and its result was never requested, as for
            :func:`fastckpt.save_async`.
        TypeError: ``ranks`` is not a process group, or an argument is unknown.
        RuntimeError: this process was forked from a rank.
        ValueError: an argument is out of range, ``path`` is a URL, or this process is not in the process group.

    Warns:
        RuntimeWarning: as for :func:`fastckpt.save_async`.

    Example:
        >>> import fastckpt.distributed, torch
        >>> pending = fastckpt.distributed.save_async({"w": torch.ones(2)}, "step-7")
        >>> pending.result().ranks
        1
    """
    began = time.perf_counter()
    together = check_ranks("save_async", ranks)
    call = Call("save", session("save_async", together.process_group), path, together.timeout)
    request = job = None
    with range_of("fastckpt.distributed.save_async"):
        try:
            call.operation.take()
            with Attempt("save", call.path, asynchronous=True):
                call.check()
                settings = SaveSettings.of("save_async", options, save_async)
                group = ProcessGroup(call.session, call.operation, together)
                spreads = Spreads(call.session.group.ranks, call.session.group.rank)
                request = build_request(
                    "save_async", call.path, state, metadata, settings, began=began, per_rank=per_rank, spreads=spreads
                )
                call.mark(request.step, state if settings.exclude is None else None)
                job = Job(request, group)
            pending = job.begin()
        except BaseException as error:
            # The other ranks wait for this one, unless a thread has taken over, which then informs them.
            if job is not None and not job.give_up(error):
                raise
            if request is not None:
                request.close()
            with call.operation:
                raise
        finally:
            call.operation.hand_over()
    tell_unasked_but(pending)
    return pending


@takes(LoadSettings, like={LoadSettings: "fastckpt.load"})
def load(
    path: AnyPath,
    into: Any = None,
    *,
    ranks: Any = None,
    **options: Unpack[LoadOptions],
) -> Any:
    """Read a checkpoint on all ranks; every rank of the group calls it, and gets what it requests.

    Any number of ranks, or one process, may have written the checkpoint, with any sharding. The storage is read once
    for all ranks: each reads a share, and sends the others the bytes that they need. On one host, cached files are read
    from the page cache.

    Args:
        path: the checkpoint's directory, the same on all ranks, or its URL in an object store (docs/stores.md), from
            which each rank reads what it requests.
        into: as for :func:`fastckpt.load`, with DTensors, ShardedTensors and :class:`Part` objects: each rank fills its
            part of them, and gets all other values. It may contain objects, too: modules, and optimizers, whose state
            is spread like their parameters; any other object gets its state with whole tensors. Ranks may request
            different tensors, as with pipeline stages. With None every rank gets the whole state, in plain tensors.
        ranks: the ranks that load together, as for :func:`save`.
        {options}

    Ranks may choose different options. With ``strict``, a tensor of the checkpoint is unexpected if no rank has a place
    for it. If all ranks of the group are on one host and all have ``io="buffered"``, they read through its page cache;
    with ``auto``, they do so if the checkpoint is cached. Otherwise they exchange messages.

    Returns:
        The state.

    Raises:
        RanksError: another rank failed, or made no progress for ``timeout`` seconds: ``failures`` names the ranks,
            their hosts and what happened there. ``into`` may be partly filled.
        StructureMismatchError: ``into`` does not fit on this rank, or no rank has a place for a tensor; nothing was
            changed.
        CorruptCheckpointError: the checkpoint is damaged; the message names the place.
        Exception: any error of :func:`fastckpt.load`, on this rank. If an object in ``into`` refuses its state
            (CheckpointError), the other ranks have loaded their states, and return.
        TypeError: ``ranks`` is not a process group, or an argument is unknown.
        RuntimeError: this thread is already in a save or load of the group, which a signal handler has interrupted; or
            this process was forked from a rank.
        ValueError: an argument is out of range, or this process is not in the process group.

    Warns:
        RuntimeWarning: as for :func:`fastckpt.load`.

    Example:
        >>> import fastckpt.distributed, torch
        >>> _ = fastckpt.distributed.save({"w": torch.ones(2)}, "step-7")
        >>> fastckpt.distributed.load("step-7", into={"w": torch.zeros(2)})  # of any sharding
        {'w': tensor([1., 1.])}
    """
    return load_on_ranks(path, into, ranks, lambda: LoadSettings.of("load", options, load)).state


def load_per_rank(
    path: AnyPath, *, rank: int | None = None, ranks: Any = None, registry: Registry | None = None
) -> Any:
    """Read the ``per_rank=`` state that a rank passed to :func:`save`. Each process reads by itself.

    Args:
        path: the checkpoint's directory, or its URL.
        rank: the rank; None for this process's rank, if the number of ranks is that of the save.
        ranks: the ranks that load, as for :func:`save`; no effect if ``rank`` is given.
        registry: as for :func:`load`.

    Returns:
        The state; None if that rank passed none.

    Raises:
        KeyError: nothing was saved with ``per_rank=``.
        ValueError: ``rank`` is None and the number of ranks has changed since the save; or ``rank`` is out of range.
        Exception: any error of :func:`fastckpt.load`.

    Example:
        >>> import fastckpt.distributed
        >>> _ = fastckpt.distributed.save({"step": 7}, "step-7", per_rank={"seed": 3})
        >>> fastckpt.distributed.load_per_rank("step-7")
        {'seed': 3}
    """
    own = None
    if rank is None:
        group = session("load_per_rank", check_ranks("load_per_rank", ranks).process_group).group
        own = (group.rank, group.size)
    return load_state_of(path, rank, own, registry)


def __dir__() -> list[str]:
    return sorted(__all__)
