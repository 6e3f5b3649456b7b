"""Drawn tensors under drawn topologies: the files equal those of one process, and load into any other topology.

Torch's own splitting decides the parts of each rank; each trial saves from one topology, compares all bytes with a save
of one process, and loads into another topology and into one process. It saves again with the checkpoint of one process
as the base, first unchanged and then with one bit changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import shutil
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fastckpt
import fastckpt.distributed
from harness import groups  # noqa: TC001
from harness.draws import one_in

if TYPE_CHECKING:
    from pathlib import Path

WORLD = 8
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "complex128", "bool", "int16", "float64", "uint8")
MESHES = [
    *[(n,) for n in range(1, WORLD + 1)],
    *[(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 3), (2, 1)],
    *[(2, 2, 2), (2, 1, 2), (1, 2, 3)],
]


@dataclass(frozen=True)
class Spread:
    """The holders of a tensor: the ranks from ``first`` on, in a mesh of this shape (in reverse order if ``turned``);
    with ``placements=None``, each has the whole as a plain tensor. ``gaps``: elements have gaps between them in memory.

    ``parts``: Parts instead of DTensors, unless shards are strided; ranks that hold nothing give empty Parts. With
    ``cuts``, each rank has a flat range from one cut to the next (fractions of all elements) and ``more`` elements."""

    first: int
    mesh: tuple[int, ...]
    turned: bool
    placements: tuple[tuple[str, int, int], ...] | None
    gaps: bool
    parts: bool
    cuts: tuple[float, ...] | None
    more: int


@dataclass(frozen=True)
class Drawn:
    """One tensor, saved under one spread and loaded under another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    saved: Spread
    loaded: Spread


def whole(drawn: Drawn) -> torch.Tensor:
    """The whole tensor, whose bits the name determines."""
    dtype = getattr(torch, drawn.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(drawn.name.encode()))
    nbytes = math.prod(drawn.shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(drawn.shape)


def _bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


@functools.cache
def _mesh(first: int, shape: tuple[int, ...], turned: bool) -> DeviceMesh:
    ranks = torch.arange(first, first + math.prod(shape))
    return DeviceMesh("cpu", (ranks.flip(0) if turned else ranks).reshape(shape))


@functools.cache
def _group(size: int) -> Any:
    # Rank 2 exchanges bytes with others by messages. The other ranks read each other's memory.
    os.environ["FASTCKPT_CMA"] = "0" if dist.get_rank() == 2 else "1"
    return None if size == dist.get_world_size() else dist.new_group(list(range(size)))


def _placement(kind: str, dim: int, factor: int) -> Any:
    return {"replicate": Replicate, "shard": lambda: Shard(dim)}.get(
        kind, lambda: _StridedShard(dim, split_factor=factor)
    )()


def _in_order(mesh: tuple[int, ...], placements: list[Any]) -> list[tuple[int, Any]]:
    """The mesh dimensions in the order in which they divide: with strided shards, later ones may come first."""

    def factor(axis: int, before: tuple[int, ...]) -> int:
        return math.prod(mesh[other] for other in before if other > axis)

    found: list[tuple[int, Any]] = []
    for dim in sorted({each.dim for each in placements if not isinstance(each, Replicate)}):
        axes = [axis for axis, each in enumerate(placements) if getattr(each, "dim", None) == dim]
        said = {axis: getattr(placements[axis], "split_factor", 1) for axis in axes}
        orders = (
            order
            for order in itertools.permutations(axes)
            if all(said[axis] == factor(axis, order[:at]) for at, axis in enumerate(order))
        )
        order = next(orders, None)
        found += [(axis, placements[axis] if order is None else Shard(dim)) for axis in order or axes]
    return found


def _part(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    # Not all dtypes support splitting and joining, but integers of the same size do.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(full.element_size(), full.dtype)
    part = full.view(bits)
    for at, placement in _in_order(tuple(mesh.shape), placements):
        pieces, _ = placement._split_tensor(part, mesh.shape[at], with_padding=False)
        # Collectives distribute parts by ascending ranks of a line of the mesh, even if the mesh is reversed.
        part = pieces[mesh.get_local_rank(at)]
    return part.clone().view(full.dtype)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape, 3), dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def _held(drawn: Drawn, spread: Spread, fill: bool) -> tuple[Any, torch.Tensor] | None:
    """This rank's part of the tensor, and the values that it must have; None if the rank has no part."""
    if spread.cuts is not None:
        return _flat(whole(drawn), spread, fill)
    count = math.prod(spread.mesh)
    mesh = None if spread.placements is None else _mesh(spread.first, spread.mesh, spread.turned)
    full = whole(drawn)
    if not spread.first <= dist.get_rank() < spread.first + count:
        if not spread.parts or spread.placements is None:
            return None
        # An empty Part does no harm, even if the others have DTensors.
        nothing = torch.empty((0,), dtype=full.dtype)
        return fastckpt.distributed.Part.flat(nothing, of=full.shape, start=0), nothing
    placements = None if spread.placements is None else [_placement(*each) for each in spread.placements]
    wanted = full if mesh is None or placements is None else _part(full, mesh, placements)
    local = wanted.clone() if fill else torch.zeros_like(wanted)
    if spread.gaps and drawn.dtype != "float8_e4m3fn":
        local = _with_gaps(local)
    if mesh is None:
        return local, wanted
    if spread.parts and not any(isinstance(each, _StridedShard) for each in placements or ()):
        return fastckpt.distributed.Part(local, of=full.shape, at=_box(full, mesh, placements or [])), wanted
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    return made, wanted


def _flat(full: torch.Tensor, spread: Spread, fill: bool) -> tuple[Any, torch.Tensor]:
    """This rank's flat range of the tensor as a Part, and its values."""
    at = dist.get_rank() - spread.first
    ends = [round(cut * full.numel()) for cut in (0, *(spread.cuts or ()), 1)]
    start, stop = (ends[at], min(ends[at + 1] + spread.more, full.numel())) if 0 <= at < len(ends) - 1 else (0, 0)
    wanted = full.reshape(-1)[start:stop].clone()
    local = wanted.clone() if fill else torch.zeros_like(wanted)
    return fastckpt.distributed.Part.flat(local, of=full.shape, start=start), wanted


def _box(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> tuple[int, ...]:
    """The start of this rank's box in each dimension."""
    numbers = torch.arange(full.numel()).reshape(full.shape)
    part = _part(numbers, mesh, placements)
    if not part.numel():
        return (0,) * full.ndim
    at = tuple(int(each) for each in torch.unravel_index(part.reshape(-1)[0], full.shape)) if full.ndim else ()
    box = tuple(slice(begin, begin + size) for begin, size in zip(at, part.shape, strict=True))
    assert torch.equal(numbers[box], part)
    return at


def _state(tensors: list[Drawn], which: str, fill: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    held = {each.name: _held(each, getattr(each, which), fill) for each in tensors}
    mine = {name: pair for name, pair in held.items() if pair is not None}
    state = {"model": {name: pair[0] for name, pair in mine.items()}, "step": 7, "note": ["a", None]}
    return state, {name: pair[1] for name, pair in mine.items()}


def _save(
    path: str,
    size: int,
    tensors: list[Drawn],
    teams: tuple[str, int],
    shard_size: int,
    background: bool,
    base: str | None = None,
) -> tuple[int, int] | None:
    """Save; return the bytes that were written and linked, or None on a rank that takes no part."""
    os.environ["FASTCKPT_AGGREGATE"], os.environ["FASTCKPT_GRAIN"] = teams[0], str(teams[1])
    group = _group(size)
    state, _ = _state(tensors, "saved", True)
    if dist.get_rank() >= size:
        return None
    options: dict[str, Any] = {
        "ranks": fastckpt.distributed.Ranks(group, timeout=30),
        "files": fastckpt.Files(shard_size=shard_size),
        "base": base,
        "metadata": {"step": 7},
    }
    if background:
        report = fastckpt.distributed.save_async(state, path, **options).result(60)
    else:
        report = fastckpt.distributed.save(state, path, **options)
    return report.bytes_total, report.linked_bytes


def _load(path: str, size: int, tensors: list[Drawn], teams: tuple[str, int]) -> list[str]:
    """Load; return the names of tensors with wrong values on this rank."""
    os.environ["FASTCKPT_AGGREGATE"], os.environ["FASTCKPT_GRAIN"] = teams[0], str(teams[1])
    group = _group(size)
    into, wanted = _state(tensors, "loaded", False)
    if dist.get_rank() >= size:
        return []
    into = {**into, "step": 0, "note": []}
    loaded = fastckpt.distributed.load(path, into=into, ranks=fastckpt.distributed.Ranks(group, timeout=30))
    wrong = [] if (loaded["step"], loaded["note"]) == (7, ["a", None]) else ["values"]
    for name, bits in wanted.items():
        held = into["model"][name]
        part = isinstance(held, fastckpt.distributed.Part)
        local = held.to_local() if isinstance(held, DTensor) else held.tensor if part else held
        if _bits(local) != _bits(bits) or loaded["model"][name] is not held:
            wrong.append(name)
    return wrong


@st.composite
def spreads(draw: st.DrawFn, size: int, dims: int) -> Spread:
    mesh = draw(st.sampled_from([each for each in MESHES if math.prod(each) <= size]))
    first = draw(st.sampled_from([0, size - math.prod(mesh)]))
    placements = None
    if draw(st.integers(0, 4)):
        kinds = ["replicate"] + (["shard", "shard", "strided"] if dims else [])
        chosen = [(draw(st.sampled_from(kinds)), draw(st.integers(0, max(0, dims - 1)))) for _ in mesh]
        placements = []
        for at, (kind, dim) in enumerate(chosen):
            # As in torch's FSDP over tensor parallelism, the factor counts the pieces of later cuts of `dim`.
            later = zip(chosen[at + 1 :], mesh[at + 1 :], strict=True)
            factor = math.prod(count for (other, of), count in later if other != "replicate" and of == dim)
            strided = kind == "strided" and factor > 1
            placements.append(
                ("strided" if strided else kind.replace("strided", "shard"), dim, factor if strided else 0)
            )
    cuts = None
    if not draw(st.integers(0, 3)):
        cuts = tuple(
            sorted(draw(st.lists(st.floats(0, 1), min_size=math.prod(mesh) - 1, max_size=math.prod(mesh) - 1)))
        )
    return Spread(
        first,
        mesh,
        draw(st.booleans()),
        None if placements is None else tuple(placements),
        draw(st.booleans()),
        draw(st.booleans()),
        cuts,
        draw(st.sampled_from([0, 0, 1, 5000])),
    )


@st.composite
def trials(draw: st.DrawFn) -> dict[str, Any]:
    saved, loaded = draw(st.integers(1, WORLD)), draw(st.integers(1, WORLD))
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        side = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 64])
        shape = draw(
            st.one_of(
                st.lists(side, max_size=3).map(tuple),
                # Shapes larger than a page with odd rows, and larger than a block with many or few rows.
                st.sampled_from([(1025, 3), (1, 4099), (3, 1, 2051), (70_001, 33), (5, 450_001)]),
            )
        )
        dtype = draw(st.sampled_from(DTYPES))
        if math.prod(shape) > 100_000:
            dtype = draw(st.sampled_from(["float16", "bool"]))
        name = f"{draw(st.sampled_from('abc'))}{index}.weight"
        tensors.append(Drawn(name, dtype, shape, draw(spreads(saved, len(shape))), draw(spreads(loaded, len(shape)))))
    return {
        "tensors": tensors,
        "saved": saved,
        "loaded": loaded,
        "shard_size": draw(st.sampled_from([5_000, 1 << 20, 1 << 30])),
        "background": draw(st.booleans()),
        "place": draw(st.none() | st.floats(0, 1)),
        # How writes and reads are distributed: each rank accesses its own pieces, or teams exchange grains.
        "teams": (
            draw(st.sampled_from(["auto", "off", "1", "2", "3", "8"])),
            draw(st.sampled_from([4096, 65536, 4 << 20])),
        ),
    }


def _digests(path: Any) -> dict[str, str]:
    return {
        str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(path.rglob("*"))
        if each.name.endswith((".safetensors", ".index.json"))
    }


def changed_in(model: dict[str, torch.Tensor], place: float) -> str | None:
    """Change one bit of a tensor, at ``place`` (0 to 1); return its name, or None if no tensor has bytes."""
    names = sorted(name for name, tensor in model.items() if tensor.numel())
    if not names:
        return None
    name = names[int(place * 97) % len(names)]
    raw = model[name].reshape(-1).view(torch.uint8)
    raw[min(int(place * raw.numel()), raw.numel() - 1)] ^= 1
    return name


class World:
    """A group for many trials, which is made anew after a failed trial, because hypothesis repeats it."""

    def __init__(self, forge: groups.Forge) -> None:
        self.forge, self.stack = forge, contextlib.ExitStack()
        self.group: groups.Group | None = None

    def run(self, function: Any, *args: Any) -> list[Any]:
        if self.group is None:
            self.group = self.stack.enter_context(self.forge.group(WORLD))
        try:
            return self.group.run(function, *args, timeout=90)
        except BaseException:
            self.stack.close()
            self.group = None
            raise


@pytest.fixture(scope="module")
def world(forge):
    made = World(forge)
    with made.stack:
        yield made


@pytest.mark.slow
@settings(max_examples=60 // one_in(2), deadline=None, suppress_health_check=list(HealthCheck))
@given(trial=trials())
def test_any_topology_writes_the_files_of_one_process_and_loads_into_any_other(world, tmp_path_factory, trial):
    base = tmp_path_factory.mktemp("trial")
    tensors = trial["tensors"]
    state = {"model": {each.name: whole(each) for each in tensors}, "step": 7, "note": ["a", None]}
    fastckpt.save(state, base / "one", files=fastckpt.Files(shard_size=trial["shard_size"]), metadata={"step": 7})
    how = [trial["teams"], trial["shard_size"], trial["background"]]
    world.run(_save, str(base / "many"), trial["saved"], tensors, *how)
    expected = _digests(base / "one")
    assert _digests(base / "many") == expected
    assert expected
    assert fastckpt.verify(base / "many").ok
    alone = fastckpt.load(base / "many")
    for name, tensor in state["model"].items():
        assert _bits(alone["model"][name]) == _bits(tensor), name
        assert alone["model"][name].shape == tensor.shape
    assert world.run(_load, str(base / "many"), trial["loaded"], tensors, trial["teams"]) == [[]] * WORLD
    if trial["place"] is not None:
        check_bases(world, base, trial, state["model"], expected)
    shutil.rmtree(base)


def check_bases(
    world: World, base: Path, trial: dict[str, Any], model: dict[str, torch.Tensor], expected: dict[str, str]
) -> None:
    """Save with the checkpoint of one process as the base, first unchanged and then with one bit changed."""
    tensors = trial["tensors"]
    again = [trial["saved"], tensors, trial["teams"], trial["shard_size"], trial["background"]]
    total = sum(len(_bits(tensor)) for tensor in model.values())
    assert set(world.run(_save, str(base / "same"), *again, str(base / "one"))) <= {(0, total), None}
    assert _digests(base / "same") == expected
    name = changed_in(model, trial["place"])
    if name is not None:
        fastckpt.save(
            {"model": model, "step": 7, "note": ["a", None]}, base / "other", files=fastckpt.Files(shard_size="1B")
        )
        changed = total - model[name].nbytes
        for report in world.run(_save, str(base / "mended"), *again, str(base / "other")):
            assert report is None or (sum(report) == total and report[1] <= changed)
        mended = fastckpt.load(base / "mended")["model"]
        assert [_bits(mended[each.name]) for each in tensors] == [_bits(whole(each)) for each in tensors]
