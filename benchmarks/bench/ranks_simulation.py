"""Many ranks in one process: the cost of agreement, layout and commit, without a byte of tensors.

Every rank runs the protocol of ``fastckpt.distributed.save`` over a store that is a dict: each rank sends up its
table's digest, the checkpoint is laid out, and each rank sends up the checksums of the bytes that it would write, which
are joined on the way. The state is like that of FSDP: equal tensors, each cut over all ranks in its first dimension.
For comparison, torch.distributed.checkpoint's default planner plans the same state, unless that has too many items.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import report
from fastckpt import _core
from fastckpt._ranks.member import Member
from fastckpt._ranks.offers import Told, combine_arrivals
from fastckpt._ranks.protocol import Turn
from fastckpt._ranks.requests import Add, Call, Forget, Get, Now, Put, Remove, Swap, Wait
from fastckpt._ranks.table import Table, encode, encode_spreads, kinds_of
from fastckpt._tensors.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The points: ranks and tensors.
POINTS = (
    *((ranks, 500) for ranks in (8, 64, 512, 2048, 8192, 16384)),
    *((512, tensors) for tensors in (2_000, 10_000, 100_000)),
    (16384, 10_000),
)
#: Approximate bytes of the state: a model of 70 billion parameters in bfloat16.
STATE = 140e9
#: The most items of all ranks together for which torch's planner runs: it needs about 2 KB and 25 us for each.
PEER_ITEMS = 600_000
#: The bars: CPU seconds and bytes of memory of the coordinator, with at most ``TENSORS`` tensors.
SECONDS, MEMORY, TENSORS = 2.0, 1 << 30, 500
PAGE = 4096
PIECE = np.dtype([("shard", "<u4"), ("start", "<u8"), ("len", "<u8"), ("crc", "<u8"), ("xz", "<u8")])


@dataclass
class Traffic:
    """The exchange of one rank with the store."""

    requests: int = 0
    #: Operations of the store: one request may need several.
    operations: int = 0
    sent: int = 0
    received: int = 0

    def note(self, request: Any, reply: Any) -> None:
        """Count a request and its reply, except those that no store serves."""
        if isinstance(request, (Now, Forget, Call)):
            return
        self.requests += 1
        self.operations += len(request.keys) if isinstance(request, (Get, Remove)) else 1
        if isinstance(request, Put):
            self.sent += sum(len(key) + len(value) for key, value in request.values.items())
        elif isinstance(request, Add):
            self.sent += len(request.key) + 8
            self.received += 8
        elif isinstance(request, Swap):
            self.sent += len(request.key) + len(request.expected) + len(request.value)
            self.received += len(reply)
        else:
            self.sent += sum(map(len, request.keys))
        if isinstance(request, Get):
            self.received += sum(len(value) for value in reply if value is not None)


class Store:
    """A dict as the store, over which ranks take turns; the clock stands still, so that no rank seems silent."""

    def __init__(self, ranks: int) -> None:
        self.values: dict[str, bytes] = {}
        self.traffic = [Traffic() for _ in range(ranks)]
        self.waiting: dict[str, list[int]] = {}
        self.missing = [0] * ranks
        self.ready: deque[tuple[int, Any]] = deque()
        #: CPU seconds of rank 0, and of all ranks.
        self.coordinator = 0.0

    def run(self, scripts: list[Any]) -> None:
        """Run all ranks to their ends."""
        self.ready.extend((rank, None) for rank in range(len(scripts)))
        while self.ready:
            rank, reply = self.ready.popleft()
            began = time.process_time() if rank == 0 else 0.0
            try:
                self._advance(rank, scripts[rank], reply)
            except StopIteration:
                continue
            finally:
                if rank == 0:
                    self.coordinator += time.process_time() - began

    def _advance(self, rank: int, steps: Any, reply: Any) -> None:
        request = steps.send(reply)
        while isinstance(request, (Now, Forget, Call)):
            answers = {Now: lambda _: 0.0, Forget: lambda _: None, Call: lambda call: call.function(call.value)}
            request = steps.send(answers[type(request)](request))
        if isinstance(request, Wait):
            self.traffic[rank].note(request, None)
            missing = [key for key in request.keys if key not in self.values]
            if missing:
                self.missing[rank] = len(missing)
                for key in missing:
                    self.waiting.setdefault(key, []).append(rank)
                return
            self.ready.append((rank, True))
            return
        reply = self._answer(request)
        self.traffic[rank].note(request, reply)
        self.ready.append((rank, reply))

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Get):
            return [self.values.get(key) for key in request.keys]
        if isinstance(request, Put):
            for key, value in request.values.items():
                self._set(key, value)
            return None
        if isinstance(request, Remove):
            for key in request.keys:
                self.values.pop(key, None)
            return None
        if isinstance(request, Add):
            count = int(self.values.get(request.key, b"0")) + request.amount
            self._set(request.key, b"%d" % count)
            return count
        if not isinstance(request, Swap):
            raise TypeError(request)
        held = self.values.get(request.key, b"")
        if held == request.expected:
            self._set(request.key, held := request.value)
        return held

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for rank in self.waiting.pop(key, ()):
            self.missing[rank] -= 1
            if not self.missing[rank]:
                self.ready.append((rank, True))


class State:
    """Equal tensors, each cut over all ranks in its first dimension."""

    def __init__(self, ranks: int, tensors: int) -> None:
        self.ranks, self.tensors = ranks, tensors
        self.rows = ranks * max(1, round(STATE / tensors / ranks / 2 / 64))
        self.shape = (self.rows, 64)
        self.nbytes = self.rows * 128
        self.names = [f"model.layers.{number:06d}.weight" for number in range(tensors)]
        self.spread = Spread(tuple(range(ranks)), (ranks,), (("shard", 0, 0),))

    def told(self, rank: int) -> Told:
        """Return a rank's message about its table, which includes everything that each rank encodes."""
        kinds, kind = kinds_of([("bfloat16", self.shape, None, 0)] * self.tensors)
        table = Table(self.names, kinds, kind, [], None, "[]")
        return Told.of(rank, encode(table), encode_spreads([self.spread]))

    def share(self, *grains: int) -> Any:
        """Return the layout that each rank makes, with page, grain and team, or (without them) in place."""
        spread = _core.Spread.mesh(self.spread.ranks, self.spread.mesh, self.spread.placements)
        tensors = [(name, "BF16", self.shape, None, (0,)) for name in self.names]
        options = _core.SaveOptions(shard_size=1 << 50)
        return _core.Share.to_save(tensors, [spread], self.ranks, options, *grains)

    def pieces(self, share: Any, *, in_place: bool = True) -> Any:
        """Return a function that returns the checksums of a rank's written bytes, encoded as the core encodes them.

        In place, a rank writes whole pages of its part of each tensor; this is faster to compute here than in the core.
        """
        base, block = _begin(share, self.nbytes)
        begins = base + np.arange(self.tensors, dtype=np.int64) * self.nbytes

        def own(rank: int) -> tuple[Any, Any]:
            first = begins + rank * self.nbytes // self.ranks
            last = begins + (rank + 1) * self.nbytes // self.ranks
            # A page with bytes of two ranks belongs to the first of them.
            first = first if rank == 0 else -(-first // PAGE) * PAGE
            last = last if rank == self.ranks - 1 else np.minimum(-(-last // PAGE) * PAGE, begins + self.nbytes)
            first, last = np.minimum(first, begins + self.nbytes), np.maximum(last, first)
            return first[last > first], last[last > first]

        def dealt(rank: int) -> tuple[Any, Any]:
            ranges = np.array([found[1:] for found in share.ranges(rank)], dtype=np.int64).reshape(-1, 2)
            return np.maximum(ranges[:, 0], base), np.minimum(ranges[:, 1], base + self.tensors * self.nbytes)

        def of(rank: int) -> bytes:
            first, last = _cut(*_cut(*(own if in_place else dealt)(rank), base, self.nbytes), 0, block)
            found = np.zeros(len(first), PIECE)
            found["start"], found["len"] = first, last - first
            found["crc"] = found["xz"] = first * 0x9E3779B1
            return found.tobytes()

        return of


def _cut(first: Any, last: Any, origin: int, step: int) -> tuple[Any, Any]:
    """Return the ranges, cut at each multiple of ``step`` after ``origin``."""
    begin = (first - origin) // step
    counts = (last - 1 - origin) // step - begin + 1
    of = np.repeat(np.arange(len(first)), counts)
    low = origin + (begin[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    return np.maximum(first[of], low), np.minimum(last[of], low + step)


def _begin(share: Any, nbytes: int) -> tuple[int, int]:
    """Return the offset of the first tensor and the block size, found by trying which pieces the layout accepts."""

    def takes(start: int, length: int) -> bool:
        piece = np.zeros(1, PIECE)
        piece["start"], piece["len"] = start, length
        try:
            share.merge([piece.tobytes()])
        except ValueError:
            return False
        return True

    low, high = 0, 1 << 40
    high = next(1 << bits for bits in range(3, 40) if takes(1 << bits, 1))
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if takes(middle, 1) else (middle, high)
    base = high
    block = next(1 << bits for bits in range(16, 50) if (1 << bits) > base and not takes((1 << bits) - 1, 2))
    return base, block if block < base + nbytes else 1 << 50


def rounds(told: Told, pieces: Callable[[], bytes], share: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the rounds of a save: name, the rank's value, the function that combines values, the one that decides."""
    yield "arrive", [*told.digests, False], combine_arrivals, None
    yield "created", None, _nothing, lambda _: "name"
    yield "joined", None, _nothing, None
    yield "done", pieces(), share.merge, lambda all_of: [len(all_of)]


def _script(rank: int, size: int, told: Told, pieces: Any, share: Any, out: dict[int, Any]) -> Any:
    member = Member(rank, size, "host", f"{rank:x}")
    for number in range(2):
        turn = Turn(member, "save", "/checkpoint", 600.0)
        answers = {}
        for name, value, combine, decide in rounds(told, lambda: pieces(rank), share):
            answers[name] = yield from turn.round(name, value, None, combine, decide)
        out[rank] = answers["arrive"], answers["done"], number


def _nothing(_: list[Any]) -> None:
    return None


def simulate(ranks: int, tensors: int) -> dict[str, Any]:
    """Return the costs of one save: seconds of CPU, bytes, requests to the store."""
    state = State(ranks, tensors)
    memory = _resident()
    began = time.process_time()
    told = state.told(0)
    agreed = time.process_time()
    share = state.share()
    laid_out = time.process_time()
    figures = share.figures(0, load=False)
    duties = time.process_time()
    memory = _resident() - memory
    of = state.pieces(share)
    store, out = Store(ranks), {}
    scripts = [_script(rank, ranks, told, of, share, out) for rank in range(ranks)]
    making = time.process_time()
    own = of(0)
    making = time.process_time() - making
    before = time.process_time()
    store.run(scripts)
    total = time.process_time() - before
    if len(out) != ranks or store.values:
        raise RuntimeError(f"{len(out)} of {ranks} ranks ended; left in the store: {list(store.values)[:3]}")
    leaf = store.traffic[-1]
    nodes = store.traffic[1 : 1 + (ranks - 2) // 32] or [leaf]
    node = max(nodes, key=lambda one: one.received)
    # The costs are the mean of two saves, so the introductions, which only the first needs, count half.
    protocol = store.coordinator / 2 - making
    return {
        "ranks": ranks,
        "tensors": tensors,
        "coordinator_cpu": (agreed - began) + (duties - agreed) + protocol,
        "table_cpu": agreed - began,
        "layout_cpu": laid_out - agreed,
        "duties_cpu": duties - laid_out,
        "protocol_cpu": protocol,
        "all_cpu": total / 2,
        # The coordinator's memory holds the table, the layout, and the messages of the last round, the largest ones.
        "memory": max(0, memory) + store.traffic[0].received,
        "pieces": len(own) // PIECE.itemsize,
        "commit": out[0][1][0],
        "figures": figures,
        **{
            f"{who}_{what}": getattr(one, what) / 2
            for who, one in (("coordinator", store.traffic[0]), ("node", node), ("leaf", leaf))
            for what in ("requests", "sent", "received")
        },
    }


def peer(ranks: int, tensors: int, *, limit: int = PEER_ITEMS) -> dict[str, Any] | None:
    """Return the coordinator's cost of torch's default planner, or None with more items than ``limit``."""
    if ranks * tensors > limit:
        return None
    import torch
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    state = State(ranks, tensors)
    rows = state.rows // ranks
    size = torch.Size(state.shape)
    properties = of_torch.TensorProperties(dtype=torch.bfloat16)

    def item(name: str, rank: int) -> WriteItem:
        offsets = torch.Size([rank * rows, 0])
        chunk = of_torch.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([rows, 64]))
        return WriteItem(
            index=of_torch.MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )

    flat = {name: (name,) for name in state.names}

    def plan(rank: int) -> bytes:
        return pickle.dumps(SavePlan([item(name, rank) for name in state.names], planner_data=flat))

    gathered = [plan(rank) for rank in range(ranks)]
    began = time.process_time()
    plans = [pickle.loads(one) for one in gathered]  # noqa: S301 - as the planner's own gather does
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    planning = time.process_time()
    made, metadata = planner.create_global_plan(plans)
    planned = time.process_time()
    scattered = [pickle.dumps(plan) for plan in made]
    written = pickle.dumps(metadata)
    return {
        "coordinator_cpu": time.process_time() - began,
        "plan_cpu": planned - planning,
        "received": sum(map(len, gathered)),
        "sent": sum(map(len, scattered)),
        "metadata": len(written),
    }


def _resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def lines(point: dict[str, Any]) -> str:
    """Return one point as text."""
    theirs = point["peer"]
    told = (
        f"torch: {theirs['coordinator_cpu']:.2f} s, {theirs['received'] / 1e6:,.1f} MB in, "
        f"metadata {theirs['metadata'] / 1e6:,.1f} MB"
        if theirs
        else f"torch: not run above {PEER_ITEMS:,} items"
    )
    return (
        f"{point['ranks']:,} ranks x {point['tensors']:,} tensors: coordinator {point['coordinator_cpu']:.3f} s CPU "
        f"(table {point['table_cpu']:.3f}, layout {point['layout_cpu']:.3f}, duties {point['duties_cpu']:.3f}, "
        f"protocol {point['protocol_cpu']:.3f}), {point['memory'] / 1e6:,.0f} MB; "
        f"requests and KB in and out: coordinator {_traffic(point, 'coordinator')}, "
        f"node {_traffic(point, 'node')}, leaf {_traffic(point, 'leaf')}; {told}"
    )


def _traffic(point: dict[str, Any], who: str) -> str:
    kilobytes = (point[f"{who}_{what}"] / 1e3 for what in ("received", "sent"))
    return "{:,.0f}, {:,.1f}, {:,.1f}".format(point[f"{who}_requests"], *kilobytes)


def draw(path: Path, points: list[dict[str, Any]]) -> None:
    """Draw CPU and traffic by ranks, and CPU by tensors."""
    from bench import plot

    by_ranks = [point for point in points if point["tensors"] == 500]
    by_tensors = [point for point in points if point["ranks"] == 512]

    def cpu(some: list[dict[str, Any]], x: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
        theirs = [(one[x], one["peer"]["coordinator_cpu"]) for one in some if one["peer"]]
        found = {("fastckpt", "coordinator"): [(one[x], one["coordinator_cpu"]) for one in some]}
        return {**found, ("torch", "coordinator"): theirs} if theirs else found

    def received(who: str) -> list[tuple[float, float]]:
        return [(one["ranks"], one[f"{who}_received"] / 1e3) for one in by_ranks]

    theirs = [(one["ranks"], one["peer"]["received"] / 1e3) for one in by_ranks if one["peer"]]
    traffic = {("fastckpt", who): received(who) for who in ("coordinator", "leaf")}
    panels = [
        ("500 tensors", "ranks", "CPU s", cpu(by_ranks, "ranks")),
        ("500 tensors: received", "ranks", "KB", {**traffic, ("torch", "coordinator"): theirs}),
        ("512 ranks", "tensors", "CPU s", cpu(by_tensors, "tensors")),
    ]
    drawn = []
    for title, x, y, every in panels:
        curves = {key: points for key, points in every.items() if points}
        if curves:
            drawn.append({"title": title, "x": x, "y": y, "log": "xy", "lines": curves})
    plot.curves(path, drawn, "Agreement, layout and commit of one save without its bytes, simulated in one process")


def run(points: list[tuple[int, int]] | None = None, picture: Path | None = None) -> list[dict[str, Any]]:
    """Simulate the points, print each when it is done, draw them, and return them."""
    found = []
    for ranks, tensors in points or POINTS:
        point = {**simulate(ranks, tensors), "peer": peer(ranks, tensors)}
        print(lines(point), flush=True)
        found.append(point)
    if picture:
        draw(picture, found)
    return found


def main() -> int:
    """Simulate the requested points; return 1 if a checked bar is missed."""
    parser = argparse.ArgumentParser(prog="ranks.py --simulate", description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="this")
    parser.add_argument(
        "--points", type=_points, help="ranks x tensors, such as 8x500,16384x500 (default: all that the guide names)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into FILE, SVG or PNG (matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    found = run(chosen.points, chosen.plot)
    report.write_json(chosen.json, {"points": found})
    heavy = [one for one in found if one["tensors"] <= TENSORS and not _is_light(one)]
    for one in heavy:
        print(f"MISSED  {one['ranks']:,} ranks x {one['tensors']:,} tensors: at most {SECONDS:g} s and 1 GiB")
    return int(chosen.check and bool(heavy))


def _is_light(point: dict[str, Any]) -> bool:
    """Whether the coordinator keeps within its bars."""
    return point["coordinator_cpu"] < SECONDS and point["memory"] < MEMORY


def _points(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(ranks), int(tensors)) for ranks, tensors in pairs]
