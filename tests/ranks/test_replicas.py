"""Ranks compare replicated tensors before they commit: a difference raises, or one rank's tensor is saved."""

from __future__ import annotations

import functools
import os
import random
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import fastckpt
import fastckpt.distributed
from fastckpt.exceptions import RanksError
from harness import points
from harness.options import grouped

#: The number of drawn saves; FASTCKPT_TEST_DIVERGENCES=2000 runs all.
TRIALS = int(os.environ.get("FASTCKPT_TEST_DIVERGENCES", "24"))
LARGE = 3 << 20  # elements of four bytes: three blocks


@functools.cache
def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))


def _values(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _save(state: Any, path: str, how: str, **options: Any) -> list[str]:
    """Save with all ranks, with options by name, and return the warnings of the report."""
    options = grouped(options)
    if how == "dcp":
        writer = fastckpt.dcp.Writer(path, **options)
        torch_dcp.save(state, storage_writer=writer)
        assert writer.report is not None
        return list(writer.report.warnings)
    if how == "async":
        return list(fastckpt.distributed.save_async(state, path, **options).result().warnings)
    return list(fastckpt.distributed.save(state, path, **options).warnings)


def _replicated(path: str, how: str, rank: int, places: list[int], **options: Any) -> list[str]:
    """Save a plain tensor and a DTensor of all ranks, in which ``rank`` has other values at these places."""
    values = _values(LARGE)
    if dist.get_rank() == rank:
        values[places] += 1
    mesh = _mesh(tuple(range(dist.get_world_size())), (dist.get_world_size(),))
    state = {"w": values, "d": DTensor.from_local(values[: LARGE // 2].clone(), mesh, [Replicate()])}
    return _save(state, path, how, **options)


def _expert_groups(path: str, how: str, equal: bool, **options: Any) -> list[str]:
    """Save two groups of experts, each with a tensor of the same name over its own ranks."""
    rank = dist.get_rank()
    ranks = _half(rank)
    # The tensors differ in one element, which a few samples would miss: only a full comparison finds it.
    values = _values(2 * LARGE)
    if not equal and rank >= 2:
        values[LARGE // 2 + 77] += 1
    half = values[(rank % 2) * LARGE :][:LARGE].clone()
    return _save({"experts": {"w1": DTensor.from_local(half, _mesh(ranks, (2,)), [Shard(0)])}}, path, how, **options)


def _told(path: str, replicas: str, places: list[int]) -> list[str]:
    """The monitor's warnings about saves of tensors in which ranks have different values."""
    told = []
    with points.replaced(points.WARN, lambda _: told.append):
        _replicated(path, "save", 1, places, replicas=replicas, on_difference="warn")
        long = {f"{40 * 'long.'}{name}": torch.full((9,), float(dist.get_rank())) for name in ("a", "b")}
        if places:
            _save(long, path, "save", on_difference="warn")
    return told


def test_the_monitor_is_told_which_tensors_differ(forge, tmp_path):
    with forge.group(2) as group:
        first, other = group.run(_told, str(tmp_path / "c"), "full", [7])
        assert first[0] in {"ranks differ in d and 1 more", "ranks differ in w and 1 more"}
        assert first[1].startswith("ranks differ in ...")
        assert first[1].endswith("long.long.a and 1 more")
        assert len(first[1]) == 64
        assert other == []
        assert group.run(_told, str(tmp_path / "c"), "full", []) == [[], []]


def _half(rank: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, ...]:
    """The two ranks in the group of a rank; all ranks make the meshes of both groups."""
    for half in (ranks[:2], ranks[2:]):
        _mesh(half, (2,))
    return ranks[:2] if rank in ranks[:2] else ranks[2:]


def _stages(path: str, how: str) -> list[str]:
    """Save stages of a pipeline, each of which numbers its layers from 0."""
    return _save({"layers.0.weight": _values(50_000, dist.get_rank() // 2)}, path, how)


def _hsdp(path: str, how: str, **options: Any) -> list[str]:
    """Save two tensors sharded by rows, of which the ranks have two copies, one of them diverged."""
    rank = dist.get_rank()
    mesh = _mesh((0, 1, 2, 3), (2, 2))
    state = {}
    for name, size in (("a", LARGE), ("b", 9_000)):
        half = _values(2 * size)[(rank % 2) * size :][:size].clone()
        if rank >= 2:
            half += 0.5
        state[name] = DTensor.from_local(half, mesh, [Replicate(), Shard(0)])
    return _save(state, path, how, **options)


def _refused(group: Any, function: Any, path: Any, *args: Any, **options: Any) -> str:
    """The error of rank 0, after checks of the errors of all ranks."""
    group.start(function, str(path), *args, **options)
    outcomes = group.outcomes()
    assert [each.kind for each in outcomes] == ["raised"] * group.size, outcomes
    first = outcomes[0].raised.text
    assert all("ranks hold different values" in each.raised.text for each in outcomes), first
    assert not path.exists()
    return first


@pytest.mark.parametrize("how", ["save", "async", "dcp"])
def test_one_name_over_two_groups_of_ranks_is_two_tensors_unless_they_are_equal(forge, tmp_path, how):
    with forge.group(4) as group:
        text = _refused(group, _expert_groups, tmp_path / "c", how, False)
        assert "experts.w1" in text
        assert "per_rank=" in text
        assert "separate names" in text
        assert "ranks 0, 1" in text
        assert "ranks 2, 3" in text
        # Tensors of one name in two groups are compared whatever replicas= is.
        assert "experts.w1" in _refused(group, _expert_groups, tmp_path / "c", how, False, replicas="first")
        assert group.run(_expert_groups, str(tmp_path / "c"), how, True) == [[]] * 4
    assert torch.equal(fastckpt.load(tmp_path / "c")["experts"]["w1"], _values(2 * LARGE))


@pytest.mark.parametrize("how", ["save", "async"])
def test_beside_a_base_that_has_what_the_owner_holds_others_are_compared_too(forge, tmp_path, how):
    """A save links a file if the rank that would write a part has not changed it, though other copies may differ."""
    base = tmp_path / "base"
    with forge.group(4) as group:
        group.run(_replicated, str(base), how, 1, [])
        for rank, replicas, at in ((1, "full", 77), (3, "full", LARGE // 3), (2, "sample", 0)):
            options = {"base": str(base), "replicas": replicas}
            text = _refused(group, _replicated, tmp_path / "c", how, rank, [at], **options)
            assert "d: " in text or at > LARGE // 2
            assert "w: " in text
            assert f"one value on rank {rank} " in text
        [warnings, *_] = group.run(_replicated, str(tmp_path / "c"), how, 1, [77], **options, on_difference="warn")
        assert any("the lowest rank's were saved, whole" in each for each in warnings)
        shutil.rmtree(base)
        group.run(_expert_groups, str(base), how, True)
        assert "experts.w1" in _refused(group, _expert_groups, tmp_path / "e", how, False, base=str(base))


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_stages_that_number_their_layers_from_0_are_refused(forge, tmp_path, how):
    with forge.group(4) as group:
        text = _refused(group, _stages, tmp_path / "c", how)
    assert "layers.0.weight" in text
    assert "ranks 0, 1" in text
    assert "ranks 2, 3" in text
    assert "separate names" in text


@pytest.mark.parametrize("how", ["save", "async", "dcp"])
def test_a_diverged_replica_is_refused_by_name_or_the_lowest_rank_is_kept_whole(forge, tmp_path, how):
    with forge.group(4) as group:
        text = _refused(group, _hsdp, tmp_path / "c", how)
        assert "\n  a: " in text
        assert "\n  b: " in text
        assert "ranks 0, 1" in text
        assert "ranks 2, 3" in text
        assert "4096 of the 4096 elements looked at differ" in text
        said = group.run(_hsdp, str(tmp_path / "c"), how, on_difference="warn")
        assert all("\n  a: " in text and "\n  b: " in text for (text,) in said)
        expected = {"a": _values(2 * LARGE), "b": _values(18_000)}
        found = fastckpt.load(tmp_path / "c")
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        (said,) = group.run(_hsdp, str(tmp_path / "first"), how, replicas="first")[0]
        assert "2 tensors" in said
        assert "not compared" in said
        found = fastckpt.load(tmp_path / "first")
        assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.parametrize("how", ["save", "async", "dcp"])
def test_all_bytes_of_eight_replicas_are_compared(forge, tmp_path, how):
    with forge.group(8) as group:
        text = _refused(group, _replicated, tmp_path / "c", how, 5, [2 * LARGE // 3], replicas="full")
        assert "w: " in text
        assert "rank 5" in text
        assert "they differ, but not in the 4096 elements looked at" in text
        assert group.run(_replicated, str(tmp_path / "c"), how, 5, [], replicas="full") == [[]] * 8
        said = group.run(_replicated, str(tmp_path / "d"), how, 0, [LARGE - 1], replicas="full", on_difference="warn")
        assert all("w: " in text for (text,) in said)
    kept = _values(LARGE)
    kept[LARGE - 1] += 1
    assert torch.equal(fastckpt.load(tmp_path / "d")["w"], kept)


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_a_mask_that_differs_in_the_middle_only_is_found(forge, tmp_path, how):
    with forge.group(2) as group:
        middle = list(range(LARGE // 2, LARGE // 2 + 8))
        assert "w: " in _refused(group, _replicated, tmp_path / "c", how, 1, middle)


def test_what_samples_miss_is_of_one_rank(forge, tmp_path):
    """If samples miss the few places in which ranks differ, the saved tensor is entirely that of one rank."""
    with forge.group(3) as group:
        group.start(_replicated, str(tmp_path / "c"), "save", 1, [100_000, LARGE - 100_000])
        kinds = {each.kind for each in group.outcomes()}
    if kinds == {"returned"}:
        found = fastckpt.load(tmp_path / "c")["w"]
        other = _values(LARGE)
        other[[100_000, LARGE - 100_000]] += 1
        assert torch.equal(found, _values(LARGE)) or torch.equal(found, other)
    else:
        assert kinds == {"raised"}
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("option", "words"), [("replicas", "sample, full, first"), ("on_difference", "raise, warn")])
def test_what_there_is_not_is_refused(option, words):
    with pytest.raises(ValueError, match=f"Ranks: {option} must be one of {words}, not 'some'"):
        fastckpt.distributed.Ranks(**{option: "some"})


#: Spreads of a two-dimensional tensor over four ranks: the ranks in the order of the mesh, its shape and placements, or
#: None if each rank has the whole tensor. Two groups of ranks have one mesh each.
SPREADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Placement]] | None] = {
    "plain": None,
    "replicate": ((0, 1, 2, 3), (4,), [Replicate()]),
    "rows": ((0, 1, 2, 3), (2, 2), [Replicate(), Shard(0)]),
    "columns": ((0, 1, 2, 3), (2, 2), [Replicate(), Shard(1)]),
    "rows of copies": ((0, 1, 2, 3), (2, 2), [Shard(0), Replicate()]),
    "two groups": ((0, 1, 2, 3), (2,), [Shard(0)]),
    "two crossed groups": ((0, 3, 1, 2), (2,), [Shard(0)]),
}


def _part(spread: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part of the tensor, in separate memory."""
    if spread in {"plain", "replicate"}:
        return whole.clone()
    ranks, _, _ = SPREADS[spread]
    at = ranks.index(rank)
    number = at // 2 if spread == "rows of copies" else at % 2
    return whole.chunk(2, 1 if spread == "columns" else 0)[number].clone()


def _copies(spread: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """All copies of the tensor, put together from the ranks' parts; the copy of rank 0 is first."""
    if spread in {"plain", "replicate"}:
        return parts
    first, second, third, fourth = SPREADS[spread][0]
    pairs = [(first, third), (second, fourth)] if spread == "rows of copies" else [(first, second), (third, fourth)]
    pairs.sort(key=min)
    return [torch.cat([parts[one], parts[other]], 1 if spread == "columns" else 0) for one, other in pairs]


def _drawn(base: str, number: int) -> str:
    """Make one drawn save; return its problem, or an empty string."""
    rng = random.Random(number)
    rank = dist.get_rank()
    state, copies, apart = {}, {}, set()
    for index in range(rng.randint(1, 3)):
        spread, name = rng.choice(list(SPREADS)), f"{'abc'[index]}.weight"
        shape = rng.choice([(2, 2), (6, 700), (130, 200), (1026, 1034)])
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(number + index))
        parts = [_part(spread, whole, each) for each in range(4)]
        for _ in range(rng.choice([0, 0, 1, 2])):
            flat = parts[rng.randrange(4)].view(-1)
            place = rng.randrange(flat.numel())
            flat[place : place + rng.choice([1, 1, 5000])] += 1
        copies[name] = _copies(spread, parts)
        own = parts[rank]
        if SPREADS[spread] is None:
            state[name] = own
            continue
        ranks, sizes, placements = SPREADS[spread]
        if spread in {"two groups", "two crossed groups"}:
            apart |= {name}
            ranks = _half(rank, ranks)
        state[name] = DTensor.from_local(own, _mesh(ranks, sizes), placements)
    diverged = {name for name, each in copies.items() if any(not torch.equal(one, each[0]) for one in each)}
    replicas, on_difference = rng.choice(["sample", "full", "first"]), rng.choice(["raise", "warn"])
    how, path = rng.choice(["save", "async", "dcp"]), f"{base}/{number}"
    about = f"{number}: {how} {replicas} {on_difference} {diverged}"
    try:
        said = "".join(_save(state, path, how, replicas=replicas, on_difference=on_difference))
    except (ValueError, RanksError, torch_dcp.api.CheckpointException) as error:
        told = str(error)
        named = {name for name in copies if f"\n  {name}: " in told}
        # Tensors of one name in two groups are always compared.
        compared = apart if replicas == "first" else diverged
        right = named and named <= diverged & compared and on_difference == "raise"
        return "" if right else f"{about}: {told[:2000]}"
    if rank:
        return ""
    named = {name for name in copies if f"\n  {name}: " in said}
    found = fastckpt.load(path)
    found = {name: found[name] if name in found else found[name[0]]["weight"] for name in copies}
    shutil.rmtree(path)
    compared = diverged if replicas == "full" else diverged & apart
    if not compared <= named <= diverged or (compared and on_difference == "raise"):
        return f"{about}: committed, named {named}"
    for name, each in copies.items():
        known = each[:1] if replicas == "first" or name in named else each
        if not any(torch.equal(one, found[name]) for one in known):
            return f"{about}: {name} equals no rank's copy"
    return ""


def _trials(base: str, first: int, count: int) -> list[str]:
    return [wrong for number in range(first, first + count) if (wrong := _drawn(base, number))]


@pytest.mark.slow
def test_whatever_diverges_is_committed_as_one_copy_has_it_or_refused_by_name(forge, tmp_path):
    with forge.group(4) as group:
        for first in range(0, TRIALS, 50):
            count = min(50, TRIALS - first)
            assert group.run(_trials, str(tmp_path), first, count, timeout=600) == [[]] * 4
