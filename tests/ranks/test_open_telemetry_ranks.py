"""Spans of several ranks, and of torch.distributed.checkpoint."""

import pytest

import fastckpt
from fastckpt import distributed
from harness.internals import join_saves
from harness.open_telemetry import Sdk, forget_failures, listening, parent
from harness.parallel import dist, torch


@pytest.fixture
def sdk():
    with listening() as made:
        yield made


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_dcp(sdk, tmp_path):
    import torch.distributed.checkpoint as dcp

    def only(name):
        span = sdk.spans()[name]
        sdk.kept.clear()
        return span.attributes.get("fastckpt.step"), span.attributes.get("error.type")

    path, state = tmp_path / "c", {"w": torch.ones(5)}
    dcp.save(state, storage_writer=fastckpt.dcp.Writer(path, metadata={"step": 8}))
    assert only("fastckpt.save") == (8, None)
    dcp.load(state, storage_reader=fastckpt.dcp.Reader(path))
    assert only("fastckpt.load") == (None, None)
    with pytest.raises(dcp.api.CheckpointException, match="not supported"):
        dcp.save({"f": print}, storage_writer=fastckpt.dcp.Writer(path))
    assert only("fastckpt.save") == (None, "UnsupportedTypeError")
    [shard] = path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(dcp.api.CheckpointException, match="CorruptCheckpointError"):
        dcp.load(state, storage_reader=fastckpt.dcp.Reader(path))
    assert only("fastckpt.load") == (None, "CorruptCheckpointError")


def of_all_ranks(path):
    """This rank's spans of a save, an asynchronous save and a load, and then of saves that fail on rank 1."""
    found = []
    sdk = Sdk()
    good, bad = {"w": torch.ones(500)}, {"f": print}
    mine = bad if dist.get_rank() == 1 else good

    def save_async(state, step):
        try:
            distributed.save_async(state, path, metadata={"step": step})
        except fastckpt.exceptions.UnsupportedTypeError:
            return
        join_saves()
        forget_failures()

    def save(state, step):
        try:
            distributed.save(state, path, metadata={"step": step})
        except fastckpt.CheckpointError:
            assert state is mine

    for call in (
        lambda: save(good, 5),
        lambda: save_async(good, 6),
        lambda: distributed.load(path),
        lambda: save(mine, 7),
        lambda: save_async(mine, 8),
    ):
        with sdk.tracer.start_as_current_span("step") as step:
            call()
        [span] = [span for name, span in sdk.spans().items() if name in ("fastckpt.save", "fastckpt.load")]
        assert parent(span) == step.get_span_context().span_id
        names = ("fastckpt.rank", "fastckpt.ranks", "fastckpt.asynchronous", "fastckpt.step", "error.type")
        found.append((span.name, *(span.attributes.get(name) for name in names)))
        sdk.kept.clear()
    return found


def test_every_rank_gives_its_own(forge, tmp_path):
    with forge.group(2) as group:
        for rank, found in enumerate(group.run(of_all_ranks, tmp_path / "c")):
            error = "UnsupportedTypeError" if rank else "RanksError"
            assert found == [
                ("fastckpt.save", rank, 2, False, 5, None),
                ("fastckpt.save", rank, 2, True, 6, None),
                ("fastckpt.load", rank, 2, False, None, None),
                ("fastckpt.save", None, None, False, None, error),
                ("fastckpt.save", None, None, True, None, error),
            ]
