"""torchtitan with the integration: a run that is killed, moved or misconfigured continues like an undisturbed one."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import fastckpt
from harness import titan
from harness.draws import pairs

pytestmark = [pytest.mark.slow, titan.needed]

STEPS = 7


@pytest.fixture(scope="module")
def forge():
    with titan.forge() as made:
        yield made


def play(groups, folder, last=STEPS, kind="ours", *, ranks=2, **config):
    """Run a training; return each rank's findings and its end.

    ``groups``: ``forge.group``, with new processes, for a job that starts again or installs fastckpt permanently; or
    ``lasting``, with processes that have trained before and have cached how torch spreads this model, which takes most
    of a run's time.
    """
    with groups(ranks) as group:
        return group.run(titan.train, folder, last, kind, timeout=240, **config)


def killed(forge, folder, dies, **config):
    with forge.group(2) as group:
        group.start(titan.train, folder, STEPS, "ours", dies=dies, **config)
        assert [one.kind for one in group.outcomes(240)] == ["died"] * 2


@pytest.fixture(scope="module")
def straight(lasting, tmp_path_factory):
    """Return the end of an undisturbed run of torchtitan's own manager."""
    return [result[2] for result in play(lasting, tmp_path_factory.mktemp("straight"), kind="stock")]


def begun(results):
    """Return the step with which all ranks began, and the end of each rank."""
    assert len({result[:2] for result in results}) == 1
    step, rows, _ = results[0]
    assert rows == 7 * step
    return step, [result[2] for result in results]


def steps_of(folder):
    return sorted(int(one.name.removeprefix("step-")) for one in (folder / "run").glob("step-*"))


@pytest.mark.parametrize(("mode", "adapter"), pairs(["disabled", "async", "async_with_pinned_mem"], [None, "whole"]))
def test_save_restart_resume_and_keep_the_latest(forge, lasting, straight, tmp_path, mode, adapter):
    config = {"async_mode": mode, "keep_latest_k": 2, "adapter": adapter}
    assert begun(play(lasting, tmp_path, 4, **config))[0] == 0
    assert steps_of(tmp_path) == [3, 4]
    assert begun(play(forge.group, tmp_path, **config)) == (4, straight)
    assert steps_of(tmp_path) == [6, 7]
    for step in (6, 7):
        path = tmp_path / "run" / f"step-{step}"
        assert fastckpt.verify(path).ok
        assert are_named(path) == {adapter is not None}
    # The run starts again after its end.
    assert begun(play(lasting, tmp_path, **config)) == (7, straight)


def are_named(path):
    """Whether tensors of the model have Hugging Face's names."""
    return {name.startswith("hf.") for name in load_file(path / "model.safetensors")}


@pytest.mark.parametrize("adapter", ["drops", "fails"])
def test_an_adapter_that_does_not_keep_all_is_left_alone(lasting, straight, tmp_path, adapter):
    """Some adapters of torchtitan drop tensors of LoRA and biases of experts; some reject kinds of sharding."""
    told = {
        "drops": "adapter fails: ValueError: it drops 1 of the names, such as gain",
        "fails": "adapter fails: RuntimeError",
    }[adapter]
    play(lasting, tmp_path, 4, adapter=adapter, told=[told])
    assert are_named(tmp_path / "run" / "step-4") == {False}
    assert begun(play(lasting, tmp_path, adapter=adapter, told=[told])) == (4, straight)
    # An export consists of the adapter's output, even if that lacks names.
    config = {"ends": True, "last_save_model_only": True, "last_save_in_hf": True}
    if adapter == "drops":
        play(lasting, tmp_path, 8, adapter=adapter, told=[told], **config)
        assert are_named(tmp_path / "run" / "step-8") == {True}


def test_names_may_change_in_a_run(lasting, straight, tmp_path):
    """Each checkpoint records which names it has."""
    for last, hugging_face in ((3, False), (5, True)):
        play(lasting, tmp_path, last, adapter="whole", hugging_face=hugging_face)
        assert are_named(tmp_path / "run" / f"step-{last}") == {hugging_face}
    assert begun(play(lasting, tmp_path, adapter="whole", hugging_face=False)) == (5, straight)


def test_stages_of_a_pipeline_share_a_loader(forge, tmp_path):
    """The state of each stage has its own random number."""
    with forge.group(2) as group:
        assert group.run(titan.pipeline, tmp_path, timeout=120) == [(True, (3, 3))] * 2


def test_a_rank_that_fails_does_not_wait_for_the_others(forge, lasting, straight, tmp_path):
    with forge.group(2) as group:
        group.start(titan.train, tmp_path, STEPS, "ours", fails=5)
        first, last = group.outcomes(120)
    assert (last.raised.kind, "negative" in last.raised.text) == ("RuntimeError", True)
    assert last.seconds < 60
    assert first.kind == "raised"
    assert begun(play(lasting, tmp_path)) == (4, straight)


def test_killed(forge, straight, tmp_path):
    """The kill comes between a step and its save; at any time, two checkpoints exist."""
    for dies in (3, 5):
        killed(forge, tmp_path, dies, keep_latest_k=2, async_mode="disabled")
        # Retention may be about to remove the checkpoint before these two.
        assert steps_of(tmp_path)[-2:] == [dies - 2, dies - 1]
    assert begun(play(forge.group, tmp_path, keep_latest_k=2)) == (4, straight)


def test_one_process_goes_on(forge, lasting, tmp_path):
    """One process continues a run of two, except for torchtitan's loader of rows."""
    play(lasting, tmp_path, 4)
    config = {"exclude_from_loading": ["dataloader"], "told": ["2 ranks saved states with per_rank="]}
    (alone,) = play(forge.group, tmp_path, 4, ranks=1, **config)
    assert alone[:2] == (4, 0)
    state = fastckpt.load(tmp_path / "run" / "step-4")
    weights = [value.tolist() for value in state["model"].values()]
    assert all(value in weights for value in alone[2][0])


def test_the_newest_that_verifies(lasting, straight, tmp_path):
    play(lasting, tmp_path, 5)
    (tmp_path / "run" / "step-5" / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "run" / "step-4" / "fastckpt.json").write_bytes(b"damaged")
    told = [*(f"step-{step} cannot be loaded and is skipped" for step in (4, 5)), "is left behind"]
    assert begun(play(lasting, tmp_path, told=told)) == (3, straight)


def test_the_newest_that_verifies_before_the_last_step(lasting, straight, tmp_path):
    """The last step has only the model."""
    config = {"ends": True, "last_save_model_only": True}
    assert begun(play(lasting, tmp_path, **config)) == (0, straight)
    (tmp_path / "run" / "step-6" / "model.safetensors").write_bytes(b"damaged")
    assert begun(
        play(lasting, tmp_path, told=["step-6 cannot be loaded", "step 7 of an earlier run is left behind"], **config)
    ) == (5, straight)
    assert fastckpt.verify(tmp_path / "run" / "step-6").ok


def test_a_seed_where_all_else_is_damaged(forge, lasting, tmp_path):
    with forge.group(1) as group:
        group.run(seed, tmp_path, timeout=120)
    play(lasting, tmp_path, 1)
    (tmp_path / "run" / "step-1" / "model.safetensors").write_bytes(b"damaged")
    assert begun(play(lasting, tmp_path, 0, told=["step-1 cannot be loaded"], load_only=True))[0] == 0


def test_a_step_is_chosen(forge, lasting, tmp_path):
    play(lasting, tmp_path, 5)
    assert begun(play(lasting, tmp_path, 5, load=3, load_only=True))[0] == 3
    with forge.group(1) as group:
        group.start(titan.train, tmp_path, 5, "ours", load=9)
        (outcome,) = group.outcomes(120)
    assert (outcome.raised.kind, "step-9" in outcome.raised.text) == ("FileNotFoundError", True)


@pytest.mark.parametrize("adapter", [None, "whole"])
def test_the_last_step_is_for_export(forge, lasting, straight, tmp_path, adapter):
    """The last step has only the model, cast; a run that starts again continues from the step before."""
    config = {"ends": True, "last_save_model_only": True, "export_dtype": "bfloat16", "adapter": adapter}
    config |= {"last_save_in_hf": adapter is not None}
    assert begun(play(lasting, tmp_path, **config)) == (0, straight)
    state = fastckpt.load(tmp_path / "run" / "step-7")
    assert [*state] == ["model"]
    assert {value.dtype for name, value in state["model"].items() if "seen" not in name} == {torch.bfloat16}
    assert fastckpt.load(tmp_path / "run" / "step-6")["train_state"]["step"] == 6
    assert begun(play(lasting, tmp_path, **config)) == (6, straight)
    assert begun(play(lasting, tmp_path, **config)) == (6, straight)
    # As with torchtitan's own manager, no run can continue from this step.
    with forge.group(1) as group:
        group.start(titan.train, tmp_path, STEPS, "ours", load=7, **config)
        (outcome,) = group.outcomes(120)
    assert "'train_state' matches nothing" in outcome.raised.text
    for step in range(1, 7):
        fastckpt.remove(tmp_path / "run" / f"step-{step}")
    with forge.group(1) as group:
        group.start(titan.train, tmp_path, STEPS, "ours", **config)
        (outcome,) = group.outcomes(120)
    assert "step-7 is the end of a run" in outcome.raised.text


def seed(folder):
    """Act like torchtitan with ``create_seed_checkpoint``: make a checkpoint of step 0, and nothing else."""
    return titan.train(folder, 0, "ours", seeds=True, last_save_model_only=True)


@pytest.mark.parametrize("change", [None, torch.bfloat16])
def test_a_seed_is_a_model(forge, lasting, tmp_path, change):
    """A seed has the dtype of exports; a run casts it to its own dtype."""
    with forge.group(1) as group:
        group.run(seed, tmp_path, timeout=120)
    assert [*fastckpt.load(tmp_path / "run" / "step-0")] == ["model"]
    results = play(lasting, tmp_path, 0, load_only=True, change=change)
    assert begun(results)[0] == 0
    numbers = {number for result in results for value in result[2][0] for number in flat(value)}
    assert numbers == {0.25}


def flat(value):
    return [number for one in value for number in flat(one)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("kind", ["ours", "stock", "installed", "hugging face"])
def test_what_a_run_begins_with(forge, lasting, tmp_path, kind):
    """A run begins with a checkpoint of fastckpt, DCP or Hugging Face, with only the model or with all."""
    hf = kind == "hugging face"
    adapter = "whole" if kind in ("ours", "hugging face") else None
    config = {"ends": True, "last_save_model_only": True} if hf else {}
    first = forge.group if kind == "installed" else lasting
    (before, *_) = play(first, tmp_path / "before", 3, "ours" if hf else kind, adapter=adapter, **config)
    path = str(tmp_path / "before" / "run" / "step-3")
    config = {"initial_load_path": path, "adapter": adapter, "initial_load_in_hf": hf, "load_only": True}
    (found, *_) = play(lasting, tmp_path / "model", 0, **config)
    assert (found[:2], found[2][0]) == ((0, 0), before[2][0])
    if not hf:
        (found, *_) = play(lasting, tmp_path / "all", 0, initial_load_model_only=False, **config)
        assert found == (3, 21, before[2])


@pytest.mark.parametrize("kind", ["stock", "installed"])
def test_a_run_that_had_torchtitans_own_manager_goes_on(forge, lasting, straight, tmp_path, kind):
    """The run may have been killed in a save, or may have gone back to torchtitan's manager in between."""
    before = forge.group if kind == "installed" else lasting
    play(before, tmp_path, 3, kind)
    cut = tmp_path / "run" / "step-4"
    cut.mkdir()
    (cut / "__0_0.distcp").write_bytes(b"cut off")
    assert begun(play(lasting, tmp_path, 4))[0] == 3
    assert not list((tmp_path / "run").glob(".step*"))
    assert fastckpt.verify(cut).ok
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / f"step-{step}")  # torchtitan resumes from its own checkpoints
    play(before, tmp_path, 5, kind)
    assert begun(play(lasting, tmp_path)) == (5, straight)


def test_without_the_line_it_ends_with_an_error(forge, lasting, tmp_path):
    play(lasting, tmp_path, 2)
    with forge.group(2) as group:
        group.start(titan.train, tmp_path, STEPS, "stock")
        assert [one.kind for one in group.outcomes(120)] == ["raised"] * 2
    assert steps_of(tmp_path) == [1, 2]


def test_what_is_not_loaded(lasting, tmp_path):
    play(lasting, tmp_path, 4)
    config = {"exclude_from_loading": ["dataloader", "lr_scheduler", "optimizer"], "load_only": True}
    whole, (part, _) = play(lasting, tmp_path, 4, load_only=True), play(lasting, tmp_path, 4, **config)
    assert part[:2] == (4, 0)
    weights, moments, rate = part[2]
    assert weights == whole[0][2][0]
    assert moments != whole[0][2][1]
    assert rate != whole[0][2][2]


def test_nothing_is_done_where_it_is_not_enabled(lasting, tmp_path):
    assert begun(play(lasting, tmp_path, 2, enable=False))[0] == 0
    assert not (tmp_path / "run").exists()


def test_a_folder_is_a_directory(forge, tmp_path):
    with forge.group(1) as group:
        group.start(titan.train, "s3://bucket", 1, "ours")
        (outcome,) = group.outcomes(120)
    assert outcome.raised.kind == "ValueError"
    assert "s3://bucket/run" in outcome.raised.text


def test_a_llama_is_one_of_hugging_face(forge, tmp_path):
    """Each checkpoint of a Llama has Hugging Face's names, by torchtitan's own adapter, which permutes rows."""
    with forge.group(2) as group:
        assert group.run(titan.llama, tmp_path, timeout=240) == [True, True]
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=16
    )
    state = load_file(tmp_path / "run" / "step-1" / "model.safetensors")
    LlamaForCausalLM(config).load_state_dict(state)


def test_a_run_that_went_back_goes_on_from_where_it_went(forge, lasting, straight, tmp_path):
    """The abandoned steps are higher, and a seed is beside them."""
    with forge.group(1) as group:
        group.run(seed, tmp_path, timeout=120)
    play(lasting, tmp_path, 5, load=-1)
    told = ["step 5 of an earlier run is left behind"]
    with forge.group(2) as group:
        group.start(titan.train, tmp_path, STEPS, "ours", load=2, dies=4, async_mode="disabled", told=told)
        assert [one.kind for one in group.outcomes(240)] == ["died"] * 2
    assert begun(play(lasting, tmp_path, 3))[0] == 3


def test_names_change_where_the_newest_is_damaged(lasting, straight, tmp_path):
    play(lasting, tmp_path, 4, adapter="whole", hugging_face=False)
    play(lasting, tmp_path, 5, adapter="whole")
    (tmp_path / "run" / "step-5" / "model.safetensors").write_bytes(b"damaged")
    told = ["step-5 cannot be loaded"]
    assert begun(play(lasting, tmp_path, adapter="whole", told=told)) == (4, straight)


def test_what_a_killed_first_save_leaves_is_no_step(lasting, tmp_path):
    left = tmp_path / "run" / ".step-5.tmp-0123456789abcdef-0"
    left.mkdir(parents=True)
    (left / "model.safetensors.index.json").write_text("{}")
    assert begun(play(lasting, tmp_path, 1))[0] == 0


def test_where_all_are_damaged_nothing_begins_anew(forge, lasting, tmp_path):
    play(lasting, tmp_path, 2)
    for step in (1, 2):
        (tmp_path / "run" / f"step-{step}" / "fastckpt.json").write_bytes(b"damaged")
    with forge.group(1) as group:
        group.start(titan.train, tmp_path, STEPS, "ours")
        (outcome,) = group.outcomes(120)
    assert outcome.raised.kind == "CorruptCheckpointError"
    assert steps_of(tmp_path) == [1, 2]
