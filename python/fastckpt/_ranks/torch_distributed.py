"""The parts of torch.distributed that ranks need: the members of a process group, its store, and a group for bytes.

This is the only file that uses torch's process groups. It handles differences between versions (2.6 to 2.15) and
private attributes of torch: the store that a process group was made with, a separate connection to it
(:func:`_own_connection`), and gloo's options (:func:`_new_gloo`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize

from fastckpt._tensors import memory as _memory

from .near import neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Kept(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Kept)

#: Up to this many ranks, every rank connects to every other when a group is made, as torch does by default; beyond it,
#: if torch can, only ranks that exchange messages connect.
_CONNECT_ALL = 32
#: A tag that no message has, see :meth:`DataGroup.end`.
_NO_TAG = 2**31 - 1
#: The most missing ranks that are named.
_NAMED = 16
#: The timeout of a transfer that must end at once: 0 would mean the group's own deadline.
_AT_ONCE = timedelta(milliseconds=1)


class Group(NamedTuple):
    """The processes that save and load together.

    Attributes:
        rank: the index of this process.
        size: the number of processes.
        ranks: the rank of each process in the default group.
        host: the name of this machine.
        store: a torch store under a name that no other group has; None for one process.
        serves: the rank whose process may run the server of that store; None if no rank does.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    host: str
    store: Any
    serves: int | None = None


_alone: list[Any] = []
if hasattr(os, "register_at_fork"):  # Windows has no fork
    # A thread of the parent may be in a turn, which would never end in the child.
    os.register_at_fork(after_in_child=_alone.clear)
#: For each process group: the process that made the result, and the result.
_kept: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def is_initialised() -> bool:
    """Whether torch has a default process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def this_process() -> Group:
    """This process as a group of one, whatever torch groups it is in."""
    rank = sys.modules["torch.distributed"].get_rank() if is_initialised() else 0
    return Group(0, 1, (rank,), socket.gethostname(), None)


def kept(operation: str, process_group: Any, make: Callable[[Group], _T]) -> _T:
    """The result of ``make`` for a process group: made once, and kept while torch has the group.

    Args:
        operation: the word that error messages begin with.
        process_group: a process group of torch's, or None for the default one. If none was initialised, only this
            process.
        make: called with the group; its result is closed when the group is gone.

    Raises:
        TypeError: ``process_group`` is not a process group.
        ValueError: this process is not in the group.
        RuntimeError: this process was forked from one that had used the group.
    """
    ready = is_initialised()
    if process_group is None and not ready:
        if not _alone:
            _alone.append(make(this_process()))
        found: _T = _alone[0]
        return found
    if not ready:
        raise ValueError(
            f"{operation}: ranks= has a process group, but torch.distributed is not initialised: call "
            "init_process_group"
        )
    group = _checked(operation, process_group)
    known: _T | None
    process, known = _kept.get(group, (os.getpid(), None))
    if process != os.getpid():
        raise RuntimeError(
            f"{operation}: this process was forked from a rank of the process group: call it in that rank instead"
        )
    if known is None:
        known = make(_group_of(group))
        _kept[group] = process, known
        # Close it when the interpreter ends, at the latest: gloo's threads must not outlive the interpreter.
        finalize(group, known.close)
    return known


def _checked(operation: str, process_group: Any) -> Any:
    from torch import distributed as dist  # noqa: PLC0415 - a single process need not have torch

    if process_group is None:
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{operation}: this process is not in the process group of ranks=: call it on its members only"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        kind = type(process_group).__qualname__
        raise TypeError(
            f"{operation}: ranks must be a process group of torch.distributed, a Ranks or None, not {kind}"
            + (": give mesh.get_group()" if kind == "DeviceMesh" else "")
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"{operation}: this process is not in the process group of ranks=: call it on its members only"
        )
    return process_group


def _group_of(group: Any) -> Group:
    from torch import distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    ranks = tuple(dist.get_process_group_ranks(group))
    size = len(ranks)
    rank = dist.get_rank(group)
    if size == 1:
        return this_process()
    name = getattr(group, "group_name", "")
    members = hashlib.sha256(repr((name, ranks)).encode()).hexdigest()[:16]
    # A store can outlive a group (torchrun's does), and torch reuses names: keys of an earlier group of the same name
    # must not confuse a new group. By default the first process serves the store; with torchrun, its agents may.
    apart = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = None if apart or 0 not in ranks else ranks.index(0)
    return Group(
        rank, size, ranks, socket.gethostname(), distributed_c10d.PrefixStore(members, _default_store()), serves
    )


def store_below(store: Any, name: str) -> Any:
    """A part of a store with separate keys."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    return distributed_c10d.PrefixStore(name, store)


def _default_store() -> Any:
    """The store of the default group: all versions of torch have this undocumented function."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    return distributed_c10d._get_default_store()


def _own_connection(store: Any) -> Any:
    """A separate connection to a store: a shared one has a lock, which the wait of another user holds."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # torch before 2.8, or a store that cannot be cloned
        return store


class Transfer:
    """A message in flight; its memory belongs to gloo until :meth:`wait` returns or the group is gone."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, seconds: float) -> None:
        """Wait for the transfer; RuntimeError if it takes more than ``seconds``, after which the whole group ends."""
        self._work.wait(timedelta(seconds=seconds))


class AbsentError(RuntimeError):
    """A group was not made.

    Attributes:
        ranks: the first of the missing ranks; empty if all have arrived.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks have not joined: {ranks}")
        self.ranks = ranks


class DataGroup:
    """A separate gloo group between host memories, apart from training and from the list of ``torch.distributed``.

    Args:
        group: the ranks in it.
        name: a name that no other group made with the same store has.
        timeout: seconds after which its creation fails because another rank is missing.

    Attributes:
        near: the ranks of this host that read each other's memory.

    Raises:
        AbsentError: ranks are missing.
    """

    def __init__(self, group: Group, name: str, timeout: float) -> None:
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        # Use a separate connection: while ranks look for each other, they wait in the store.
        store = distributed_c10d.PrefixStore(name, _own_connection(group.store))
        self.rank = group.rank
        self.size = group.size
        self._met: set[int] = set()
        self._store = store
        # The keys stay: a late rank must see that another has come, even if that one is gone.
        here = [_here(rank) for rank in range(group.size)]
        store.set(here[group.rank], group.host)
        try:
            self._gloo = _new_gloo(store, group.rank, group.size, timedelta(seconds=timeout))
            self.near = neighbours(group.rank, group.ranks, group.host, store)
        except RuntimeError as error:
            absent = (rank for rank, key in enumerate(here) if not store.check([key]))
            raise AbsentError(list(itertools.islice(absent, _NAMED))) from error

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host, for an error; empty if the store does not answer."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_here(rank)]):
                return str(self._store.get(_here(rank)).decode())
        return ""

    def send(self, peer: int, address: int, nbytes: int, owner: object) -> Transfer:
        """Begin to send memory, which ``owner`` keeps alive, to another rank."""
        self._met.add(peer)
        tensor = _tensor(address, nbytes, owner)
        return Transfer(self._gloo.send([tensor], peer, 0), tensor)

    def receive(self, peer: int, address: int, nbytes: int, owner: object) -> Transfer:
        """Begin to receive from another rank; messages of one rank arrive in order."""
        self._met.add(peer)
        tensor = _tensor(address, nbytes, owner)
        return Transfer(self._gloo.recv([tensor], peer, 0), tensor)

    def broadcast(self, content: bytes | None, nbytes: int, limit: float) -> bytes:
        """Send ``content`` of rank 0, ``nbytes`` long, to all ranks. All ranks call this at about the same time."""
        from torch import distributed as dist  # noqa: PLC0415

        data = bytearray(nbytes) if content is None else bytearray(content)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._met.add(0 if self.rank else 1)
        self._gloo.broadcast([_tensor_of(data)], options).wait(timedelta(seconds=limit))
        return bytes(data)

    def swap(self, given: Mapping[int, bytes], sizes: Mapping[int, int], limit: float) -> dict[int, bytes]:
        """Send bytes to some ranks, and receive bytes of given sizes from others; no size is 0."""
        taken = {peer: bytearray(nbytes) for peer, nbytes in sizes.items()}
        tensors = {peer: _tensor_of(bytearray(content)) for peer, content in given.items()}
        self._met.update(taken, tensors)
        moved = [self._gloo.recv([_tensor_of(data)], peer, 0) for peer, data in taken.items()]
        moved += [self._gloo.send([tensor], peer, 0) for peer, tensor in tensors.items()]
        for each in moved:
            each.wait(timedelta(seconds=limit))
        return {peer: bytes(data) for peer, data in taken.items()}

    def end(self) -> None:
        """End all transfers with an error, here and at the other ranks, which see that the connections are closed.

        Gloo closes connections when a transfer times out, so this makes one time out. The group is unusable after that.
        """
        peers = self._met or ({1 - min(self.rank, 1)} if self.size <= _CONNECT_ALL else ())
        tensor = _tensor_of(bytearray(1))
        # A connection may be closed while others are open. In a large group, only ranks that met are connected.
        for peer in tuple(peers):
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([tensor], peer, _NO_TAG).wait(_AT_ONCE)


def _here(rank: int) -> str:
    """The key whose value is the host of a rank that has come to a group."""
    return f"here/{rank}"


def _tensor(address: int, nbytes: int, owner: object) -> Any:
    import torch  # noqa: PLC0415

    return torch.from_numpy(_memory.at(address, nbytes, owner))


def _tensor_of(content: bytearray) -> Any:
    import torch  # noqa: PLC0415

    return torch.frombuffer(content, dtype=torch.uint8)


def _new_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group, over the interfaces that GLOO_SOCKET_IFNAME names."""
    from torch import distributed as dist  # noqa: PLC0415

    gloo: Any = dist.ProcessGroupGloo
    if size > _CONNECT_ALL:
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        try:
            devices = [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
                gloo.create_default_device(lazy_init=True)
            ]
        except TypeError:  # a torch without this option
            pass
        else:
            options = gloo._Options()
            options._devices = devices
            options._timeout = timeout
            options._threads = 2 * len(devices)
            return gloo(store, rank, size, options)
    return gloo(store, rank, size, timeout)
