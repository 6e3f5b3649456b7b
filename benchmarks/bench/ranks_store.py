"""The cost of a save, a restore and a preemption for one real TCPStore with many clients.

    python benchmarks/ranks.py --store --clients 1000 --tensors 30000 --check

From the store's view, every client is a rank, with the package's protocol, connections and threads. No client has
tensors. A save sends the messages for an FSDP state and a file system that many machines share: each rank sends
the checksums of the ranges that the layout assigns to it. In a restore, the newest checkpoint has one damaged block,
which one rank reads, so the ranks load the previous one. In a preemption, one rank receives a signal in the middle of a
step, and all ranks stop at one step. The server has its own process, and the clients share a few processes; all share
this machine, so seconds are more than on a cluster, where each client has a core. The server's work does not depend on
that: its CPU seconds, bytes and memory are the kernel's counts (the peak of the resident set, minus its size with all
clients connected), and operations are the requests of the clients.
"""

# ruff: noqa: SLF001 - the exchange of ranks is counted and driven from within

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import MB, options, report
from bench.bars import Bar
from bench.ranks_simulation import State, Traffic, rounds
from bench.ranks_world import World, obey
from fastckpt import when
from fastckpt._manager import crew as crews
from fastckpt._manager.preemption import Preemption, Signals
from fastckpt._manager.restore import failures_of
from fastckpt._manager.schedule import Schedule
from fastckpt._manager.step_boundary import StepBoundary
from fastckpt._manager.step_timing import StepTiming
from fastckpt._ranks import peers
from fastckpt._ranks.called import location_of
from fastckpt._ranks.requests import Wait
from fastckpt._ranks.store import Transport
from fastckpt._ranks.torch_distributed import Group, store_below
from fastckpt.exceptions import CorruptCheckpointError, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

#: The scenes, in order.
SCENES = ("save", "restore", "preemption")
#: Seconds of a step in the two preemptions, and seconds of training before the signal, within one of the longer steps.
STEPS, BEFORE = (5.0, 0.01), 11.7
TIMEOUT = 600.0
#: Page, grain and team of a save to a file system that many machines share.
SHARED = (4096, 4 << 20, 0)
#: The bars: seconds of a save's rounds, and of the answer to a signal; bytes of the server's memory.
SAVE, ANSWER, MEMORY = 10.0, 3.0, 200 * MB
#: Bytes of a thread's stack: many threads run, and each needs little.
STACK = 512 << 10
HOME = str(Path(__file__).parent)


class Counted(Transport):
    """A client that counts its requests and replies."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.traffic = Traffic()
        self._waited: tuple[str, ...] = ()

    def serve(self, request: Any, limit: float) -> Any:
        """Serve a request, and count it."""
        reply = super().serve(request, limit)
        # A repeated wait for the same keys continues at the server and costs the server nothing, so it does not count.
        if not (isinstance(request, Wait) and request.keys == self._waited):
            self.traffic.note(request, reply)
        self._waited = request.keys if isinstance(request, Wait) and not reply else ()
        return reply


class _Session:
    """The part of a process group that a manager uses."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.group = Group(rank, size, tuple(range(size)), f"node-{rank // 8:04d}", store)
        self.made: list[peers.Peers] = []
        self.peers = self.apart()

    def apart(self) -> peers.Peers:
        group = self.group
        store = store_below(group.store, str(len(self.made)))
        self.made.append(peers.Peers(group.rank, group.size, store, group.host, shown=False))
        return self.made[-1]

    def end(self, apart: peers.Peers) -> None:
        apart.close()


class Boundary(StepBoundary):
    """A boundary at which the ranks ask each other, after :meth:`passes` returned False."""

    def _passes(self, step: int, *, needed: bool = False) -> bool:  # noqa: ARG002 - as its base has it
        return False

    def passes(self, step: int) -> bool:
        """Whether all ranks pass the boundary without asking each other."""
        return StepBoundary._passes(self, step)


class Client:
    """One rank."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.session = _Session(rank, size, store)
        self.place = location_of(HOME, self.session.group.host)
        self.signals = Signals(shared=True)
        self.saves = SimpleNamespace(step=None, in_flight=False, look=lambda _: None, plan=lambda step: {"at": step})
        self.saves.settle = lambda _: []

    def manage(self) -> None:
        """Make a manager's objects for its boundaries."""
        self.crew = crews.Crew(None, HOME)
        timing = StepTiming()
        schedule = Schedule([when.Every(steps=10**9)], timing)
        preemption = Preemption(HOME, self.signals, self.saves, self.crew)
        self.boundary = Boundary(self.crew, schedule, timing, self.saves, SimpleNamespace(), preemption)
        self.crew.listen(self.signals.told)
        self.boundary.should_save(0)

    def operation(self, kind: str, path: str) -> peers.Operation:
        """Begin a save or load."""
        return self.session.peers.operation(kind, f"{HOME}/{path}", TIMEOUT, place=self.place)

    def save(self, path: str, said: Callable[[], Any]) -> None:
        """Do the rounds of a save."""
        with self.operation("save", path) as turn:
            turn.mark({"0.step": f"'{path}'"})
            for name, value, combine, decide in said():
                turn.round(name, value, combine=combine, decide=decide)

    def load(self, path: str, *, damaged: bool) -> None:
        """Do the rounds of a load, in which one block may be damaged: its reader, the last rank, raises."""
        with self.operation("load", path) as turn:
            turn.mark(dict(self.crew.answered))
            turn.round("arrive", [[self.session.group.host], [], [True, ""]], combine=lambda values: values[0])
            turn.round("wanted", [None, None, False], combine=lambda values: values[0])
            if damaged and self.rank == self.session.group.size - 1:
                raise CorruptCheckpointError(
                    f"load: {HOME}/{path}: model-00007-of-00200.safetensors: the checksum of the block at byte "
                    "1,073,741,824 is 0x9b1f3c5d77aa0e42, not 0x1a2b3c4d5e6f7081: tensor model.layers.31.mlp.weight"
                )
            turn.round("done", None, combine=lambda _: None)

    def restore(self) -> None:
        """Do a manager's restore: its questions to rank 0, and the loads between them."""
        for at, path in enumerate(("step-2000", "step-1000")):
            if at == 0:
                self.crew.first("restore", lambda: [[2000, False], [1000, False]])
            error = None
            try:
                self.load(path, damaged=at == 0)
            except (RanksError, CorruptCheckpointError) as failed:
                error = failed
            if bool(failures_of(self.crew, error)) != (at == 0):
                raise RuntimeError(f"rank {self.rank}: {path}: {error}")
            if at == 0:
                self.crew.first("restore: look", lambda: False)


class Job(NamedTuple):
    """The common parameters of all clients.

    Attributes:
        clients: their number.
        tensors: the number of tensors of the state.
        in_place: whether each rank writes its own part of each tensor, not the ranges that its team assigns to it.
        together: the barrier at which their processes meet in each step.
    """

    clients: int
    tensors: int
    in_place: bool
    together: Barrier


class Crowd:
    """Some of the clients, each in a thread."""

    def __init__(self, index: int, crowds: int, port: int, job: Job) -> None:
        import torch.distributed as dist

        threading.stack_size(STACK)
        # By default, each of a thousand threads that wait for the interpreter requests it 200 times a second.
        sys.setswitchinterval(1.0)
        self.size, self.tensors, self.in_place, self.together = job
        peers.Transport = Counted
        store = dist.TCPStore("127.0.0.1", port)
        self.clients: list[Client] = []
        crews.session = lambda *_: self._at.session
        for rank in range(index, self.size, crowds):
            self.clients.append(Client(rank, self.size, store))
        self._local = threading.local()
        self._cpu = 0.0
        self.said: list[Callable[[], Any]] = []

    @property
    def _at(self) -> Client:
        found: Client = self._local.client
        return found

    def each(self, function: Callable[[Client], Any], some: list[Client] | None = None) -> dict[str, Any]:
        """Run a function of each client in the thread of the client; return when they began and ended.

        Raises:
            Exception: a client failed.
        """
        errors: list[BaseException] = []
        ends: list[float] = []

        def run(client: Client) -> None:
            self._local.client = client
            try:
                function(client)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
            ends.append(time.monotonic())

        threads = [threading.Thread(target=run, args=(client,)) for client in some or self.clients]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return {"began": began, "ended": max(ends)}

    def traffic(self) -> list[float]:
        """Return all clients' operations, bytes sent, bytes received and CPU seconds since the last call."""
        now = time.process_time()
        total = [0, 0, 0, now - self._cpu]
        self._cpu = now
        for client in self.clients:
            for one in client.session.made:
                found = one._transport.traffic
                total[:3] = total[0] + found.operations, total[1] + found.sent, total[2] + found.received
                one._transport.traffic = Traffic()
        return total

    def prepare_save(self) -> None:
        """Make the messages of the ranks."""
        state = State(self.size, self.tensors)
        told, share = state.told(0), state.share(*(() if self.in_place else SHARED))
        of = state.pieces(share, in_place=self.in_place)
        pieces = [of(client.rank) for client in self.clients]
        self.said = [functools.partial(rounds, told, lambda each=each: each, share) for each in pieces]

    def save(self, path: str) -> dict[str, Any]:
        """Save on all clients."""
        said = dict(zip(self.clients, self.said, strict=True))
        return self.each(lambda client: client.save(path, said[client]))

    def manage(self) -> dict[str, Any]:
        """Make the managers, unless they exist."""
        self.said = []
        if hasattr(self.clients[0], "crew"):
            return {}
        return self.each(Client.manage)

    def end(self) -> None:
        """Close the managers, if they exist."""
        if hasattr(self.clients[0], "crew"):
            self.each(lambda client: client.crew.end())

    def restore(self) -> dict[str, Any]:
        """Restore on all clients."""
        return self.each(Client.restore)

    def train(self, begins: float, seconds: float, called: float, whom: int) -> dict[str, Any]:
        """Take steps together, like the ranks of a job, until a signal to one rank is answered.

        Args:
            begins: when the first step begins, on the monotonic clock.
            seconds: the duration of a step.
            called: when the signal arrives.
            whom: the rank that receives the signal.
        """
        cost, share, step = 0.0, 0.0, 0
        for client in self.clients:
            if client.rank == whom:
                threading.Timer(called - time.monotonic(), client.signals._handle, (signal.SIGUSR1, None)).start()
        while True:
            step += 1
            self.together.wait(TIMEOUT)
            time.sleep(max(0.0, begins + step * seconds - time.monotonic()))
            waiting = [client for client in self.clients if not client.boundary.passes(step)]
            if waiting:
                self.each(lambda client, at=step: client.boundary.should_save(at), waiting)
            now = time.monotonic()
            if waiting and now < called:
                first = self.clients[0].crew
                cost = first._cost
                share = cost / (cost + (first._skip + 1) * max(seconds, (now - begins) / step))
            stopped = [client for client in self.clients if client.signals.called]
            if stopped:
                if len(stopped) != len(self.clients):
                    raise RuntimeError(f"step {step}: {len(stopped)} of {len(self.clients)} ranks stop")
                for client in self.clients:
                    client.signals._called.clear()
                    client.signals._pending.clear()
                    client.boundary._wanted = None
                return {"step": step, "ended": now, "cost": cost, "share": share}
            if now > called + 60:
                raise RuntimeError("no client noticed the signal within a minute")


def _crowd(index: int, crowds: int, port: int, connection: Connection, job: Job) -> None:
    obey(Crowd(index, crowds, port, job), connection)


class Server:
    """The server's process, with the kernel's counts."""

    def __init__(self, process: int) -> None:
        self.at = Path(f"/proc/{process}")
        #: The server's memory before the first client: Python and torch.
        self._bare = self._now()["memory"]
        self._began: dict[str, float] = {}

    def begin(self) -> None:
        """Begin to count."""
        (self.at / "clear_refs").write_text("5")
        self._began = self._now()

    def counts(self) -> dict[str, float]:
        """Return CPU seconds and bytes since ``begin``, and the peak of memory since then."""
        now = self._now()
        found = {name: now[name] - self._began[name] for name in ("cpu", "in", "out")}
        return {**found, "memory": now["peak"] - self._bare}

    def _now(self) -> dict[str, float]:
        fields = (self.at / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        io = dict(line.split(": ") for line in (self.at / "io").read_text(encoding="ascii").splitlines())
        status = dict(line.split(":", 1) for line in (self.at / "status").read_text(encoding="ascii").splitlines())
        kilobytes = {name: int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")}
        return {
            "cpu": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            "in": int(io["rchar"]),
            "out": int(io["wchar"]),
            "memory": kilobytes["VmRSS"],
            "peak": kilobytes["VmHWM"],
        }


class Scenes:
    """The scenes, over one store."""

    def __init__(self, processes: int, clients: int, tensors: int, *, in_place: bool) -> None:
        self.clients = clients
        # The barrier ends with its last reference, and starting processes have none yet: this reference keeps it alive.
        self.job = Job(clients, tensors, in_place, multiprocessing.get_context("spawn").Barrier(processes))
        self.world = World(processes, functools.partial(_crowd, job=self.job))
        self.server = Server(self.world.processes[0].pid)
        self.found: list[dict[str, Any]] = []

    def scene(self, name: str, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Run a method of all crowds, and record its cost for the server."""
        self.world.ask("traffic")
        self.server.begin()
        said = self.world.ask(method, *arguments)
        server = self.server.counts()
        asked = [sum(each) for each in zip(*self.world.ask("traffic"), strict=True)]
        began = min((one["began"] for one in said if "began" in one), default=None)
        ended = max(one["ended"] for one in said)
        self.found.append(
            {
                "scene": name,
                "seconds": None if began is None else ended - began,
                "operations": asked[0],
                "sent": asked[1],
                "received": asked[2],
                "cpu": asked[3],
                "server": server,
            }
        )
        return said

    def save(self) -> None:
        """Measure two saves: in the first, the ranks also introduce themselves."""
        self.world.ask("prepare_save")
        self.scene("save, the first", "save", "step-1")
        self.scene("save", "save", "step-2")

    def restore(self) -> None:
        """Measure a restore that skips a damaged checkpoint."""
        self.world.ask("manage")
        self.scene("restore past a damaged block", "restore")

    def preemption(self) -> None:
        """Measure the answer to a signal during training."""
        self.world.ask("manage")
        for seconds in STEPS:
            begins = time.monotonic() + 1
            called = begins + BEFORE
            said = self.scene(
                f"preemption, steps of {seconds:g} s", "train", begins, seconds, called, self.clients // 3
            )
            if len({one["step"] for one in said}) != 1:
                raise RuntimeError(f"ranks stop at different steps: {sorted({one['step'] for one in said})}")
            # This is the first boundary after the signal; no rank can answer the signal earlier.
            boundary = begins + math.ceil(BEFORE / seconds) * seconds
            ended = max(one["ended"] for one in said)
            self.found[-1].update(
                seconds=ended - boundary,
                signal=ended - called,
                cost=said[0]["cost"],
                share=said[0]["share"],
            )


def lines(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table, head first."""
    rows = [["", "s", "operations", "MB in", "MB out", "CPU s of clients", "of the server", "server MB"]]
    for one in found:
        server = one["server"]
        cells = [server["in"] / MB, server["out"] / MB, one["cpu"], server["cpu"], server["memory"] / MB]
        numbers = [report.number(one["seconds"], 2), f"{one['operations']:,}"]
        rows.append([one["scene"], *numbers, *(report.number(cell, 2 if cell < 10 else 0) for cell in cells)])
    return rows


def bars(found: list[dict[str, Any]]) -> list[Bar]:
    """Return the bars on the figures."""
    made = []
    for one in found:
        name = one["scene"]
        if name.startswith("save"):
            made.append(Bar(f"{name}: seconds", one["seconds"], SAVE, at_least=False))
        if "signal" in one:
            made.append(Bar(f"{name}: seconds beyond the first boundary", one["seconds"], ANSWER, at_least=False))
            made.append(Bar(f"{name}: share of the time for questions", one["share"], 0.005, at_least=False))
        made.append(Bar(f"{name}: MB of the server", one["server"]["memory"] / MB, MEMORY / MB, at_least=False))
    return made


def main() -> int:
    """Run the requested scenes; return 1 if a checked bar is missed."""
    parser = argparse.ArgumentParser(
        prog="ranks.py --store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help="this")
    parser.add_argument("--clients", type=options.positive, default=1000, help="ranks (default: 1000)")
    parser.add_argument("--processes", type=options.positive, default=2, help="processes of the clients (default: 2)")
    parser.add_argument("--tensors", type=options.positive, default=30_000, help="tensors saved (default: 30000)")
    parser.add_argument(
        "--in-place", action="store_true", help="save as with FASTCKPT_AGGREGATE=off, not in teams as by default"
    )
    parser.add_argument("--scenes", type=options.several(str), default=list(SCENES), help="which (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    scenes = Scenes(chosen.processes, chosen.clients, chosen.tensors, in_place=chosen.in_place)
    try:
        for name in chosen.scenes:
            getattr(scenes, name)()
        scenes.world.ask("end")
    finally:
        scenes.world.close()
    print(f"{chosen.clients:,} clients in {chosen.processes} processes, {chosen.tensors:,} tensors.")
    print(report.render(lines(scenes.found), markdown=chosen.markdown))
    for one in scenes.found:
        if "signal" in one:
            print(
                f"{one['scene']}: answered {one['signal']:.2f} s after the signal, {one['seconds']:.2f} s after "
                f"the first boundary behind it; the last question before took {one['cost']:.2f} s, and the pace "
                f"agreed on then gives questions {one['share']:.3%} of the time"
            )
    demands = bars(scenes.found)
    for bar in demands:
        print(bar)
    report.write_json(chosen.json, {"scenes": scenes.found, "bars": [bar.document() for bar in demands]})
    return int(chosen.check and not all(bar.met for bar in demands))
