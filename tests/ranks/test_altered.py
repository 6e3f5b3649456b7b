"""One bit changes between ranks: both sides raise, the old checkpoint is unchanged, and the next call works."""

import contextlib
import os
import random
import re

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastckpt
from fastckpt import distributed
from fastckpt.dcp import Reader, Writer
from harness import altered
from harness.parallel import dist, torch

#: Tensors spread by columns: most pages of the files, and most blocks in a load, have bytes of all ranks.
SHAPES = {"a": (301, 1200), "b": (3, 40), "c": (5000, 90)}


def full(number):
    return {name: torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + number
            for name, (rows, columns) in SHAPES.items()}  # fmt: skip


def spread(number):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(1)]) for name, tensor in full(number).items()}


def call(how, path, number):
    if how == "save":
        distributed.save(spread(number), path, ranks=distributed.Ranks(timeout=60))
    elif how == "save_async":
        distributed.save_async(spread(number), path, ranks=distributed.Ranks(timeout=60)).result(60)
    elif how == "load":
        distributed.load(path, into=spread(number), ranks=distributed.Ranks(timeout=60), io="threads")
    elif how == "dcp.save":
        dcp.save(spread(number), checkpoint_id=path, storage_writer=Writer(ranks=distributed.Ranks(timeout=60)))
    else:
        dcp.load(
            spread(number), checkpoint_id=path, storage_reader=Reader(ranks=distributed.Ranks(timeout=60), io="threads")
        )


def under(how, path, number, rank, context, *given):
    """Make the call on all ranks, with altered incoming bytes on one rank; return the alteration and the exception."""
    found = []
    alters = getattr(altered, context)(*given, found) if dist.get_rank() == rank else contextlib.nullcontext()
    try:
        with alters:
            call(how, path, number)
    except BaseException as error:  # noqa: BLE001 - torch's are not derived from Exception
        return found, f"{type(error).__name__}: {error}"
    return found, None


def over_network():
    os.environ["FASTCKPT_CMA"] = "0"


HOWS = ["save", "save_async", "load", "dcp.save", "dcp.load"]


@pytest.mark.parametrize("how", HOWS)
def test_an_altered_message_is_an_error_on_both_sides(forge, tmp_path, how):
    dice, path, ranks = random.Random(how), tmp_path / "c", 3
    fastckpt.save(full(0), path)
    met = 0
    with forge.group(ranks) as group:
        group.run(over_network)
        # A message ends with its checksum, which is altered, too.
        for rank, place in [(rank, place) for rank in range(ranks) for place in (dice.random(), 1)]:
            outcomes = group.run(under, how, path, 1, rank, "message", 0, place)
            giver = outcomes[rank][0]
            if not giver:
                assert not [text for _, text in outcomes if text]
                if "save" in how:
                    fastckpt.save(full(0), path)
                continue
            met += 1
            for _, text in outcomes:
                assert text is not None
                assert re.search(
                    rf"from rank {giver[0]} on \S+ to rank {rank} on \S+ were altered on their way", text
                ), text
                assert re.search(r"tensors? `.*within bytes \d+ to \d+ of model.*checksum is", text), text
            found = fastckpt.load(path)
            assert all(torch.equal(found[name], tensor) for name, tensor in full(0).items())
        group.run(call, how, path, 2)
    assert met >= 2
    assert fastckpt.verify(path).ok


@pytest.mark.parametrize("kind", ["up", "verdict"])
@pytest.mark.parametrize("how", ["save", "load", "dcp.save"])
def test_an_altered_word_is_an_error_on_all_ranks(forge, tmp_path, how, kind):
    """If the answer of the last round is altered, everything is committed, but that rank cannot know this."""
    dice, path, ranks = random.Random(how + kind), tmp_path / "c", 3
    fastckpt.save(full(0), path)
    met = 0
    with forge.group(ranks) as group:
        group.run(call, how, path, 0)
        for number in range(5):
            rank = 0 if kind == "up" else dice.choice([1, 2])
            outcomes = group.run(under, how, path, 0, rank, "word", kind, number, dice.random())
            keys, text = outcomes[rank]
            if not keys:
                assert not [text for _, text in outcomes if text]
                continue
            met += 1
            assert "was altered on its way" in text
            others = [other for at, (_, other) in enumerate(outcomes) if at != rank]
            if None in others:
                assert others == [None, None]
                assert kind == "verdict"
                if "save" in how:
                    assert "the outcome is unknown" in text
            else:
                assert all(f"rank {rank} on " in other and "altered on its way" in other for other in others), others
            assert fastckpt.verify(path).ok
        group.run(call, how, path, 0)
    assert met >= 2


def with_another_version(path, rank):
    if dist.get_rank() == rank:
        altered.version("0.0.1 (plan 7)")
    distributed.save(spread(1), path, ranks=distributed.Ranks(timeout=60))


@pytest.mark.parametrize("rank", [0, 2])
def test_another_version_is_refused_by_name(forge, tmp_path, rank):
    fastckpt.save(full(0), tmp_path / "c")
    with forge.group(3) as group:
        group.start(with_another_version, tmp_path / "c", rank)
        outcomes = group.outcomes()
    for each in outcomes:
        assert "0.0.1 (plan 7)" in each.raised.text
        assert fastckpt.__version__ in each.raised.text
        assert re.search(
            r"rank [12] on \S+ runs fastckpt .*, but rank 0 runs .*: all ranks must run the same", each.raised.text
        )
    found = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(found[name], tensor) for name, tensor in full(0).items())
