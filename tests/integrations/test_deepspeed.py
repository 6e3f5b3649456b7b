"""DeepSpeed with the integration: a ZeRO state of any number of processes is restored on any other, bit for bit."""

from __future__ import annotations

import pytest
import torch
import zero
from safetensors.torch import load_file

import fastckpt
from harness import groups
from harness.draws import some


@pytest.fixture(scope="module")
def processes():
    """Makes groups of processes that have imported DeepSpeed."""
    # These modules are imported by the first engine.
    later = (
        "module_inject.auto_ep_layer",
        "runtime.superoffload.superoffload_stage3",
        "runtime.zero.muon.original_muon",
    )
    modules = ",".join(
        ["harness.member", "accelerate", "fastckpt.integrations.deepspeed", *(f"deepspeed.{one}" for one in later)]
    )
    env = {"FASTCKPT_TEST_IMPORT": modules, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    with groups.forge(env=env) as forge:
        yield forge


def play(processes, ranks, folder, stage, dtype="bf16", **more):
    with processes.group(ranks, backend="gloo") as group:
        return group.run(zero.play, str(folder), stage, dtype, timeout=120, **more)


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "how"),
    some(
        [
            (4, 2, "fp16", {"round_robin_gradients": True, "parameter_alignment": True}),
            (4, 1, "bf16", {}),
            (4, 3, "bf16", {}),
            (2, 3, "fp32", {"model": zero.Hiding}),
            (2, 1, "fp32 sums", {}),
            (2, 1, "fp32", {}),
            (2, 2, "bf16", {"offload_optimizer": {"device": "cpu"}, "model": zero.Hiding}),
            (2, 3, "bf16", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        ]
    ),
)
def test_any_number_of_processes_goes_on(processes, tmp_path, ranks, stage, dtype, how):
    """Mutant: a trained tensor comes back only if the model's own ``state_dict`` has it."""
    _, saved, losses, end = zip(*play(processes, ranks, tmp_path, stage, dtype, save=3, **how), strict=True)
    assert saved[0]["counters"][0] == 3
    assert (tmp_path / "latest").read_text() == "global_step3"
    for now in sorted({ranks, 2, 1}):
        found = play(processes, now, tmp_path, stage, dtype, first=3, **how)
        for rank, (back, loaded, again, last) in enumerate(found):
            assert loaded == saved[0]
            assert back == {"rank": rank if now == ranks else 0}
            if now == ranks:
                assert (again, last) == (losses[rank], end[rank])


def test_the_files_are_those_of_the_state(processes, tmp_path):
    """The files do not depend on ranks or stage. The model's file opens alone, with its own names."""
    _, saved, *_ = play(processes, 4, tmp_path, 3, save=2, last=2)[0]
    for ranks, stage in ((2, 1), (1, 2), (2, 3)):
        with processes.group(ranks, backend="gloo") as group:
            assert group.run(zero.moved, str(tmp_path), stage, "again", timeout=120) == [saved] * ranks
        first, again = (fastckpt.load(tmp_path / name) for name in ("global_step2", "again"))
        assert repr(again["deepspeed"]) == repr(first["deepspeed"])
        for name in ("model.safetensors", "training/training.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "global_step2" / name).read_bytes()
    assert fastckpt.verify(tmp_path / "global_step2").ok
    weights = load_file(tmp_path / "global_step2" / "model.safetensors")
    model = zero.Model().bfloat16()
    assert model.load_state_dict(weights, strict=False) == (["head.weight"], [])  # which is tied
    for name, value in weights.items():
        if name != "seen":
            assert value.flatten().view(torch.uint8).tolist() == saved[name]
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        assert first["optimizer"][key]["up.weight"].flatten().view(torch.uint8).tolist() == saved[f"up.weight: {key}"]


def test_what_is_not_supported_is_refused_before_anything_is_written(processes, tmp_path):
    with processes.group(2, backend="gloo") as group:
        said = group.run(zero.refused, str(tmp_path), timeout=120)[0]
    for what in zero.OTHERS:
        assert all(f"fastckpt does not support {what}" in one for one in said[what])
    assert "states that are offloaded now (engine.reload_states)" in said["offloaded"][0]
    assert "fastckpt does not support custom_load_fn" in said["custom_load_fn"][0]
    assert said["client_state"][0].startswith("UnsupportedTypeError")
    for what in ("other sizes", "other dtypes"):
        assert "differ from the parameters in size or dtype: ['exp_avg']" in said[what][0]
    for what, key in (("copies", "gain"), ("others", "note")):
        assert all(f"such as a copy ({key})" in one for one in said[what])
    assert said["save_dir"][0].startswith("ValueError: save_checkpoint: save_dir is empty")
    assert "optimizers other than those of ZeRO" in said["none of ZeRO"][0]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["known", "latest"]
    assert (tmp_path / "latest").read_text() == "known"


@pytest.mark.parametrize("stage", [2, 3])
def test_one_process_that_fails_ends_the_call_on_all(processes, tmp_path, stage):
    """The engine stays unchanged. Buffers come from the first process; parameters must be equal on all processes."""
    undeclared = pytest.warns(RuntimeWarning, match=r"values of zero\.Note, which this program does not declare")
    with processes.group(2, backend="gloo") as group, undeclared:
        first, second = group.run(zero.disturbed, str(tmp_path), stage, timeout=120)
    assert first[0] == "OSError: of one process alone"
    assert second[0].startswith("RanksError: save_checkpoint: ")
    assert "rank 0" in second[0]
    assert first[1].startswith("RanksError: save_checkpoint: ")
    assert "such as a copy (gain)" in second[1]
    assert first[2].startswith("RanksError: load_checkpoint: ")
    assert second[2] == "OSError: of one process alone"
    assert all("frozen.weight" in one for one in (*first[3:], *second[3:]))
    assert fastckpt.load(tmp_path / "first's")["module"]["seen"] == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["first's", "global_step2", "latest"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_part_is_loaded(processes, tmp_path, stage):
    """Mutant: a layer that was frozen is trained from the values that it had before the load."""
    with processes.group(2, backend="gloo") as group:
        thin, thawed = group.run(zero.partly, str(tmp_path), stage, timeout=120)[0]
    assert thin.startswith("StructureMismatchError")
    assert "differs in parameter groups" in thawed


def test_checkpoints_of_deepspeed_are_loaded_by_it(processes, tmp_path):
    with processes.group(2, backend="gloo") as group:
        said = group.run(zero.theirs, str(tmp_path), timeout=120)[0]
    assert said.startswith("FileExistsError")
    assert (tmp_path / "global_step2" / "mp_rank_00_model_states.pt").is_file()


def test_latest_names_what_is_durable(processes, tmp_path):
    """A process that ends before it writes the name leaves both checkpoints, and the name of the first one."""
    with processes.group(2, backend="gloo") as group:
        group.start(zero.twice, str(tmp_path), strike=groups.Strike(0, "fastckpt:open_write", nth=2))
        assert [one.kind for one in group.outcomes(60, ranks=[0])] == ["died"]
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert [fastckpt.verify(tmp_path / name).ok for name in ("global_step2", "global_step4")] == [True, True]
    assert [found[1]["counters"][0] for found in play(processes, 2, tmp_path, 3, first=2, last=2)] == [2, 2]


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_has_the_engine_save(processes, tmp_path, stage):
    with processes.group(2, backend="") as group:
        for first, again in group.run(zero.accelerated, str(tmp_path), stage, timeout=120):
            assert first == again != []
    assert fastckpt.verify(tmp_path / "pytorch_model").ok
    assert (tmp_path / "random_states_0.pkl").is_file()


def test_the_programs_of_the_guide(processes, tmp_path):
    """Runs the programs of docs/guides/deepspeed.md."""
    with processes.group(1, backend="gloo") as group:
        assert group.run(zero.guide, str(tmp_path), timeout=120) == [["random", "step"]]
