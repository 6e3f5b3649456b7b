"""Values of several ranks under one key of dcp.save: the lowest rank's is saved, and differences are reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.dcp import Writer
from fastckpt.distributed import Ranks
from harness import logged, needs, standin
from harness.parallel import dist, torch

#: Values that pipeline stages may have under one name; equal numbers give equal values.
WITH_TENSORS = {
    "tuple": lambda number: (1, torch.eye(4) * number),
    "array": lambda number: np.full((3, 2), number),
    "large array": lambda number: np.full(50_000, float(number)),
    "deep": lambda number: ({"array": np.full(2, number), "name": "same"}, [(torch.full((2,), float(number)),)]),
    "bytes beside": lambda number: (b"same" * 300, torch.eye(2) * number),
    "generator": lambda number: torch.Generator().manual_seed(number),
}
PLAIN = {
    "number": lambda number: number,
    "text": lambda number: f"text {number}",
    "list": lambda number: [1, [number]],
    "scalar": np.float32,
    "set": lambda number: {"a", "b", str(number)},
    "bytes": lambda number: bytes([number]),
    "long bytes": lambda number: bytes([number]) * 5000,
    "longer bytes": lambda number: b"x" * 5000 * number,
    "bytes in a list": lambda number: [1, bytearray([number] * 3000)],
    "tensor beside": lambda number: (number, torch.ones(3)),
    "bytes beside a tensor": lambda number: (torch.ones(3), b"x" * number, b"y" * 1000 * number, torch.zeros(2)),
}
KINDS = {**WITH_TENSORS, **PLAIN}


def save(path, how, kind, numbers, options):
    """Save on all ranks, each with the value of its number; return the log and the report's warnings."""
    state = {"layers": {"0": {"weight": KINDS[kind](numbers[dist.get_rank()])}}, "w": torch.ones(3)}
    warnings = None
    with logged.warnings() as texts:
        if how == "install":
            with fastckpt.dcp.install(ranks=Ranks(timeout=60, **options)):
                dcp.save(state, checkpoint_id=path)
        else:
            writer = Writer(path, ranks=Ranks(timeout=60, **options))
            dcp.save(state, storage_writer=writer)
            warnings = writer.report.warnings
    return texts, warnings


def saved(group, path, kind, numbers, how="writer", **options):
    """The warnings of a save, which all ranks report, and the stored value."""
    said = group.run(save, str(path), how, kind, numbers, options)
    assert all(one == said[0] for one in said)
    texts, warnings = said[0]
    if warnings is not None:
        assert texts == [f"{path}: {each}" for each in warnings]
    found = fastckpt.load(path)
    assert torch.equal(found["w"], torch.ones(3))
    return texts, found["layers"]["0"]["weight"]


def refusals(lasting, path, kind, numbers, how="writer", **options):
    """The errors on all ranks of a save that fails before it writes anything."""
    with lasting(len(numbers)) as group:
        group.start(save, str(path), how, kind, numbers, options)
        texts = [each.raised.text for each in group.outcomes()]
    assert list(path.parent.iterdir()) == []
    return texts


def same(one, other):
    """Whether two values are equal as stored."""
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_are_silent(lasting, tmp_path, kind):
    with lasting(2) as group:
        texts, found = saved(group, tmp_path / "c", kind, [2, 2])
    assert texts == []
    assert same(found, KINDS[kind](2))


@pytest.mark.parametrize("how", ["writer", "install"])
@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_different_tensors_and_arrays_in_values_are_refused(lasting, tmp_path, kind, how):
    for text in refusals(lasting, tmp_path / "c", kind, [1, 2], how):
        assert f"dcp.save: {tmp_path / 'c'}: tensors or arrays in values differ between ranks" in text
        assert "'layers.0.weight' (rank 1's differs from rank 0's)" in text
        assert "give values of different ranks separate keys" in text
        assert "per_rank=" not in text


@pytest.mark.parametrize("how", ["writer", "install"])
@pytest.mark.parametrize("kind", PLAIN)
def test_other_values_that_differ_are_the_lowest_ranks_and_the_report_names_them(lasting, tmp_path, kind, how):
    with lasting(2) as group:
        (text,), found = saved(group, tmp_path / "c", kind, [1, 2], how)
    assert text == (
        f"{tmp_path / 'c'}: values differ between ranks; the lowest rank's were saved: 'layers.0.weight' (rank 1's "
        "differs from rank 0's)"
    )
    assert same(found, KINDS[kind](1))
    assert fastckpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_different_tensors_in_values_are_the_lowest_ranks_where_that_is_a_warning(lasting, tmp_path, kind):
    with lasting(2) as group:
        (text, *others), found = saved(group, tmp_path / "c", kind, [1, 2], on_difference="warn")
    assert text == (
        f"{tmp_path / 'c'}: tensors or arrays in values differ between ranks; the lowest rank's were saved: "
        "'layers.0.weight' (rank 1's differs from rank 0's)"
    )
    assert others == []
    assert same(found, KINDS[kind](1))


@pytest.mark.parametrize("kind", ["tuple", "array", "number", "tensor beside"])
def test_nothing_is_compared_if_the_first_ranks_are_asked_for(lasting, tmp_path, kind):
    with lasting(2) as group:
        (text,), found = saved(group, tmp_path / "c", kind, [1, 2], replicas="first")
    assert "replicas='first'" in text
    assert same(found, KINDS[kind](1))


OTHER = {
    "shape": lambda number: (number, torch.ones(number)),
    "dtype": lambda number: np.ones(3, [np.float32, np.float64][number - 1]),
    "count": lambda number: [np.ones(2)] * number + [np.zeros(2)],
    "more": lambda number: 5 if number == 1 else (5, torch.ones(2)),
    "fewer": lambda number: (5, torch.ones(2)) if number == 1 else 5,
    "name": lambda number: ({"a": torch.ones(2)} if number > 1 else {"b": torch.ones(2)},),
}
KINDS |= OTHER


@pytest.mark.parametrize("kind", OTHER)
def test_values_with_other_tensors_are_refused(lasting, tmp_path, kind):
    for text in refusals(lasting, tmp_path / "c", kind, [1, 1, 2]):
        assert "tensors or arrays in values differ between ranks" in text
        assert "'layers.0.weight' (rank 2's differs from rank 0's)" in text
    for options in ({"on_difference": "warn"}, {"replicas": "first"}):
        with lasting(3) as group:
            texts, found = saved(group, tmp_path / "c", kind, [1, 1, 2], **options)
        assert any("(rank 2's differs from rank 0's)" in text for text in texts) == ("on_difference" in options)
        assert same(found, KINDS[kind](1))


def test_the_report_names_a_rank_that_differs_from_the_lowest(lasting, tmp_path):
    with lasting(5) as group:
        (text,), found = saved(group, tmp_path / "c", "long bytes", [3, 3, 1, 3, 2])
    assert text.endswith("saved: 'layers.0.weight' (rank 2's differs from rank 0's)")
    assert found == bytes([3]) * 5000


def save_in_places(path, options):
    """Save arrays of 2 MB which differ between ranks in a single place, so that samples may miss it."""
    arrays = [np.zeros(1 << 19, np.float32) for _ in range(6)]
    for array in arrays:
        array[100_003] = dist.get_rank() + 1
    dcp.save({"k": (dist.get_rank(), *arrays)}, storage_writer=Writer(path, ranks=Ranks(timeout=60, **options)))


def test_a_value_is_one_ranks_wherever_its_arrays_differ(lasting, tmp_path):
    with lasting(2) as group:
        group.run(save_in_places, tmp_path / "c", {"on_difference": "warn"})
        number, *arrays = fastckpt.load(tmp_path / "c")["k"]
        assert [number, *(array[100_003] for array in arrays)] == [0, *[1] * 6]
        group.start(save_in_places, tmp_path / "d", {})
        assert all("'k' (rank 1's differs from rank 0's)" in each.raised.text for each in group.outcomes())


def save_with_options(path, options):
    """Save equal values with this rank's options."""
    ranks = Ranks(timeout=60, **options[dist.get_rank()])
    dcp.save({"k": (1, torch.ones(3))}, storage_writer=Writer(path, ranks=ranks))


def test_other_options_on_a_rank_are_no_difference_of_values(lasting, tmp_path):
    with lasting(2) as group:
        group.start(save_with_options, tmp_path / "c", [{}, {"replicas": "first"}])
        for each in group.outcomes():
            assert "replicas" in each.raised.text
            assert "differs from rank 0's" not in each.raised.text


def save_of_ranks(path, count):
    """Save values under separate keys, and more different values than a report lists."""
    rank = dist.get_rank()
    state = {"loader": {f"dp_rank_{rank}": bytes([rank]) * 5000, "world_size": 2}, f"rng_{rank}": np.full(3, rank)}
    state |= {"values": {f"{number:03d}": rank for number in range(count)}}
    writer = Writer(path, ranks=Ranks(timeout=60))
    dcp.save(state, storage_writer=writer)
    return writer.report.warnings


def test_values_under_keys_of_ranks_are_silent_and_long_lists_are_cut(lasting, tmp_path):
    with lasting(2) as group:
        assert group.run(save_of_ranks, tmp_path / "c", 0) == [()] * 2
        said = group.run(save_of_ranks, tmp_path / "d", 25)
    assert said[0] == said[1]
    assert said[0][0].endswith("'values.009' (rank 1's differs from rank 0's) and 15 more")
    loaded = fastckpt.load(tmp_path / "c")
    assert [loaded["loader"][f"dp_rank_{rank}"][0] for rank in range(2)] == [0, 1]
    assert [loaded[f"rng_{rank}"].tolist() for rank in range(2)] == [[0] * 3, [1] * 3]


def save_on_devices(path, number):
    """Save a value with a tensor on a device that only this rank uses."""
    device = torch.device(standin.NAME, dist.get_rank())
    writer = Writer(path, ranks=Ranks(timeout=60))
    dcp.save({"pair": (1, torch.full((3,), float(number[dist.get_rank()])).to(device))}, storage_writer=writer)
    return writer.report.warnings


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
def test_tensors_in_values_are_equal_on_devices_with_other_numbers(forge, tmp_path):
    if not standin.AVAILABLE:
        needs.missing("needs torch 2.10 (a device that is set up from Python)")
    with forge.group(2) as group:
        assert group.run(save_on_devices, tmp_path / "c", [4, 4]) == [()] * 2
        assert torch.equal(fastckpt.load(tmp_path / "c")["pair"][1].cpu(), torch.full((3,), 4.0))
        group.start(save_on_devices, tmp_path / "d", [4, 5])
        assert all("'pair' (rank 1's differs from rank 0's)" in each.raised.text for each in group.outcomes())
