"""The ranks: processes that live for all calls and form a gloo group, whose store has a separate process.

Each call begins on all ranks at the same time (after a barrier) and is measured in each rank: wall-clock seconds, CPU
seconds, the peak of its memory, and the bytes that it read from and wrote to storage by the kernel's count
(/proc/self/io). A call lasts from the first rank's start to the last rank's end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import ranks_contenders, ranks_states
from bench.measure import measure

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

# Seconds to wait for a call: longer than any call here takes on a working disk.
PATIENCE = 900


@dataclass(frozen=True)
class Call:
    """One call on all ranks.

    Attributes:
        seconds: the time from the first start to the last end.
        cpu: user and system seconds of all ranks.
        extra: bytes of memory beyond the state, of the rank with the most.
        read: bytes that all ranks read from storage.
        written: bytes that all ranks wrote to storage.
        state_bytes: bytes of the whole tensors, each counted once.
        notes: the report of rank 0.
    """

    seconds: float
    cpu: float
    extra: int | None
    read: int
    written: int
    state_bytes: int
    notes: dict[str, Any] = field(default_factory=dict)


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


class _Rank:
    """The data that a rank's process keeps between calls."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.blank: dict[str, Any] = {}

    def make(self, kind: str, size: int, count: int, *, loads: bool) -> int:
        """Make the state and the destinations of loads; return the bytes of the state of all ranks."""
        self.state, self.blank = {}, {}
        self.state = ranks_states.make(kind, size, count)
        if loads:
            self.blank = ranks_states.make(kind, size, count, blank=True)
        return ranks_states.global_bytes(self.state)

    def call(self, action: str, name: str, path: str) -> dict[str, Any]:
        """Save, load or plan, all ranks together, and measure."""
        import torch.distributed as dist

        if action == "load":
            for tensor in self.blank.values():
                ranks_states.local(tensor).zero_()
        function = ranks_contenders.of(action, name)
        state = self.blank if action == "load" else self.state
        times: dict[str, float] = {}

        def timed() -> dict[str, Any]:
            dist.barrier()
            times["began"] = time.monotonic()
            notes = ranks_contenders.quietly(function, state, path)
            times["ended"] = time.monotonic()
            return notes

        before = _io()
        sample, notes = measure(timed)
        after = _io()
        return {
            **times,
            "cpu": sample.cpu,
            "extra": sample.extra,
            "read": after["read_bytes"] - before["read_bytes"],
            "written": after["write_bytes"] - before["write_bytes"],
            "notes": notes,
        }

    def compare(self) -> list[str]:
        """Return the names of tensors that differ from the saved ones."""
        return ranks_states.differences(self.blank, self.state)


def _run(rank: int, size: int, port: int, connection: Connection) -> None:
    """Serve as a rank until the parent closes the connection."""
    # One thread of torch per rank, as launchers set it.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=size)
    obey(_Rank(), connection)


def obey(me: Any, connection: Connection) -> None:
    """Call the methods of ``me`` that the parent requests, until it closes; then the process ends."""
    with contextlib.suppress(EOFError):
        while True:
            method, arguments, named = connection.recv()
            try:
                answer = getattr(me, method)(*arguments, **named)
            except Exception:  # noqa: BLE001 - whatever it is, the parent tells it
                connection.send((False, traceback.format_exc()))
            else:
                connection.send((True, answer))
    os._exit(0)


def _serve(connection: Connection) -> None:
    """Run the store, like torchrun's agent."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    connection.send(server.port)
    with contextlib.suppress(EOFError):
        connection.recv()
    os._exit(0)


class World:
    """All ranks, as seen by the parent.

    Args:
        size: the number of processes.
        run: the function of each: it gets its index, ``size``, the store's port and a connection to the parent.
    """

    def __init__(self, size: int, run: Callable[[int, int, int, Connection], None] = _run) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Any] = []
        self.processes: list[Any] = []
        self.state_bytes = 0

        def start(target: Any, *arguments: Any) -> Any:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            return ours

        self.store = start(_serve)
        port = self.store.recv()
        for rank in range(size):
            self.connections.append(start(run, rank, size, port))

    def ask(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Run a method of all ranks; return their answers.

        Raises:
            OSError: a rank failed, died or did not answer.
        """
        for connection in self.connections:
            connection.send((method, arguments, named))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(PATIENCE):
                raise OSError(f"rank {rank} has not answered for {PATIENCE} s in {method} {arguments}")
            try:
                well, answer = connection.recv()
            except EOFError:
                raise OSError(f"rank {rank} died in {method} {arguments}") from None
            if not well:
                raise OSError(f"rank {rank}: {method} {arguments}:\n{answer}")
            answers.append(answer)
        return answers

    def make(self, kind: str, size: int, count: int = 0, *, loads: bool = False) -> int:
        """Have all ranks make their parts of a state; return the bytes of the state of all ranks."""
        self.state_bytes = int(self.ask("make", kind, size, count, loads=loads)[0])
        return self.state_bytes

    def call(self, action: str, name: str, path: Path) -> Call:
        """Have all ranks save, load or plan together."""
        answers = self.ask("call", action, name, str(path))
        extras = [answer["extra"] for answer in answers if answer["extra"] is not None]
        return Call(
            seconds=max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers),
            cpu=sum(answer["cpu"] for answer in answers),
            extra=max(extras, default=None),
            read=sum(answer["read"] for answer in answers),
            written=sum(answer["written"] for answer in answers),
            state_bytes=self.state_bytes,
            notes=answers[0]["notes"],
        )

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()
