"""transformers' Trainer with the integration: killed, stopped and restarted, it ends like an undisturbed run."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import peft
import pytest
import runs
import torch
import trainer_kills
import trainers
from runs import ended
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fastckpt
from harness import cli, pages

play = partial(runs.play, trainers.train)
KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def undisturbed(libraries, tmp_path_factory):
    """Return the end of an undisturbed run, by its arguments."""
    return runs.undisturbed(trainers.train, libraries, tmp_path_factory.mktemp)


def steps_of(folder):
    return sorted(int(path.name.partition("-")[2]) for path in Path(folder, "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param((KILL, 17, "on_step_end"), id="in the middle of an epoch"),
        pytest.param((KILL, 10, "on_step_end"), id="before the log, the evaluation and the save"),
        pytest.param((KILL, 10, "on_evaluate"), id="between the evaluation and the save"),
        pytest.param((KILL, 20, "on_evaluate"), id="at the last step"),
        pytest.param((KILL, 20, "on_train_end"), id="when all is done"),
        pytest.param((TERM, 9, "on_step_end"), id="stopped"),
        pytest.param((TERM, 20, "on_step_end"), id="stopped at the last step"),
    ],
)
def test_a_run_that_is_disturbed_ends_as_one_that_is_not(libraries, undisturbed, tmp_path, strike):
    """Both end with equal weights, log, loss, best model, metric and callback states, and the same checkpoints."""
    wanted = undisturbed()
    first = play(libraries, tmp_path, strike)
    assert [one.kind for one in first] == ["died" if strike[0] == KILL else "returned"]
    if strike[0] == TERM and strike[1] < trainers.STEPS:
        (_, left), step = ended(first), strike[1] + 1
        # The step that was running at the signal was saved at its end, although another checkpoint is the best.
        assert f"checkpoint-{step}" in left or f"checkpoint-{step - 1}" in left
    assert ended(play(libraries, tmp_path)) == wanted
    # The run starts again after its end.
    assert ended(play(libraries, tmp_path)) == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"gradient_accumulation_steps": 3, "max_steps": 10}, id="accumulation"),
        pytest.param({"save_strategy": "epoch", "eval_strategy": "epoch"}, id="epochs"),
        pytest.param({"save_strategy": "best", "metric_for_best_model": "eval_loss"}, id="best"),
        pytest.param(
            {"load_best_model_at_end": False, "eval_strategy": "no", "save_total_limit": 2, "save_steps": 4}, id="plain"
        ),
    ],
)
def test_with_other_arguments(libraries, undisturbed, tmp_path, arguments):
    wanted = undisturbed(**arguments)
    at = arguments.get("max_steps", trainers.STEPS) * 2 // 3
    assert [one.kind for one in play(libraries, tmp_path, (KILL, at, "on_step_end"), **arguments)] == ["died"]
    assert ended(play(libraries, tmp_path, **arguments)) == wanted
    assert ended(play(libraries, tmp_path, **arguments)) == wanted


@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_accumulation_steps": 2, "max_steps": 10}], ids=["", "accumulation"]
)
def test_two_ranks(libraries, undisturbed, tmp_path, arguments):
    """Each rank evaluates a part of the rows; the log of the first rank is saved."""
    wanted = undisturbed(ranks=2, **arguments)
    at = arguments.get("max_steps", trainers.STEPS) * 2 // 3
    strike = (KILL, at, "on_step_end")
    assert [one.kind for one in play(libraries, tmp_path, strike, ranks=2, **arguments)] == ["died"] * 2
    assert ended(play(libraries, tmp_path, ranks=2, **arguments)) == wanted


EPOCHS = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_total_limit": None}


@pytest.mark.parametrize(
    ("strike", "arguments"),
    [
        pytest.param((TERM, 10, "on_step_end"), {"save_strategy": "best"}, id="best"),
        pytest.param((TERM, 6, "on_step_end"), {"save_strategy": "epoch", **EPOCHS}, id="epochs"),
        pytest.param((TERM, 8, "on_step_end"), {"save_strategy": "epoch", **EPOCHS}, id="at the end of an epoch"),
        pytest.param((KILL, 9, "on_epoch_end"), {"save_steps": 9, **EPOCHS}, id="a step's save at the end of an epoch"),
        pytest.param((KILL, 20, "on_train_end"), {"save_steps": 20, **EPOCHS}, id="the last step"),
    ],
)
def test_a_stop_keeps_what_belongs_to_an_epoch(libraries, undisturbed, tmp_path, strike, arguments):
    """Log line, evaluation and save of an epoch come at its end, and only once."""
    arguments = {"load_best_model_at_end": False, "metric_for_best_model": "eval_loss", **arguments}
    wanted = undisturbed(**arguments)
    (first,) = play(libraries, tmp_path, strike, **arguments)
    if strike[0] == TERM:
        # The save comes at the end of the running step or of the next step.
        assert max(steps_of(tmp_path)) == first.value[0]["step"]
        assert strike[1] <= first.value[0]["step"] <= strike[1] + 1
    summary, left = ended(play(libraries, tmp_path, **arguments))
    assert summary == wanted[0]
    assert {*wanted[1]} <= {*left}  # the checkpoint of the stop is additional


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"patience": 1, "learning_rate": 0.2, "save_total_limit": None}, id="early"),
        pytest.param({"max_steps": -1, "num_train_epochs": 3}, id="epochs"),
    ],
)
def test_a_run_that_has_ended_takes_no_further_step(libraries, undisturbed, tmp_path, arguments):
    wanted = undisturbed(**arguments)
    assert (wanted[0]["step"] < trainers.STEPS) == ("patience" in arguments)
    for _ in range(2):
        assert ended(play(libraries, tmp_path, **arguments)) == wanted


def test_a_checkpoint_is_a_model_and_all_of_the_training(libraries, tmp_path):
    ended(play(libraries, tmp_path, save_total_limit=None))
    path = tmp_path / "out" / "checkpoint-20"
    assert steps_of(tmp_path) == list(range(5, 21, 5))
    assert fastckpt.verify(path).ok
    model = AutoModelForCausalLM.from_pretrained(path)
    stored = load_file(path / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())
    assert {"config.json", "generation_config.json", "trainer_state.json", "training_args.bin"} <= {
        one.name for one in path.iterdir()
    }
    state = fastckpt.load(path)
    assert sorted(state) == ["model", "optimizer", "scheduler"]
    assert fastckpt.distributed.load_per_rank(path).keys() == {"random", "counted"}


def test_the_newest_that_verifies_is_taken(libraries, undisturbed, tmp_path):
    arguments = {"save_total_limit": None}
    wanted = undisturbed(**arguments)
    assert [one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), **arguments)] == ["died"]
    assert steps_of(tmp_path) == [5, 10, 15]
    shard = next((tmp_path / "out" / "checkpoint-15" / "training").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "out" / "checkpoint-10" / "model.safetensors").unlink()
    (tmp_path / "out" / "checkpoint-99").mkdir()  # left by a Trainer that was killed
    summary, left = ended(play(libraries, tmp_path, **arguments))
    assert (summary, left) == (wanted[0], [*wanted[1], "checkpoint-99"])
    told = (tmp_path / "log.txt").read_text()
    assert "checkpoint-15 is damaged" in told
    assert "checkpoint-10 is damaged" in told


@pytest.mark.parametrize("what", ["the Trainer's state", "the manifest", "a directory in the way"])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(libraries, undisturbed, tmp_path, what):
    arguments = {"save_total_limit": None}
    wanted = undisturbed(**arguments)
    assert [one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), **arguments)] == ["died"]
    path = tmp_path / "out" / "checkpoint-15"
    if what == "the Trainer's state":
        file = path / "trainer_state.json"
        file.write_text(file.read_text().replace('"global_step": 15', '"global_step": 16'))
    elif what == "the manifest":
        (path / "fastckpt.json").write_bytes((path / "fastckpt.json").read_bytes()[:-9])
    else:
        (path / "fastckpt.json").unlink()  # as after a Trainer was killed in its save
        (path / "trainer_state.json").unlink()
    # One program passes the directory with the highest number, as Axolotl does; the others have text arguments.
    resume = str(path) if what == "a directory in the way" else "True"
    assert ended(play(libraries, tmp_path, resume=resume, **arguments)) == wanted
    told = (tmp_path / "log.txt").read_text()
    assert f"checkpoint-15 is {'not whole' if what == 'a directory in the way' else 'damaged'}" in told
    assert not [*path.parent.glob(".*")]  # the directory in the way is gone
    assert fastckpt.verify(path).ok


def test_what_others_write_into_a_checkpoint_goes_with_it(libraries, undisturbed, tmp_path):
    arguments = {"load_best_model_at_end": False, "save_total_limit": 2}
    assert ended(play(libraries, tmp_path, writes=True, **arguments)) == undisturbed(**arguments)
    assert (tmp_path / "out" / "checkpoint-20" / "notes").is_dir()


def test_a_buffer_that_differs_between_ranks_is_the_first_ones(libraries, undisturbed, tmp_path):
    """DDP lets each rank change its buffer until the next step, when the first rank sends its buffer to all."""
    wanted = undisturbed(ranks=2, local=True)
    strike = (KILL, 17, "on_step_end")
    assert [one.kind for one in play(libraries, tmp_path, strike, ranks=2, local=True)] == ["died"] * 2
    assert ended(play(libraries, tmp_path, ranks=2, local=True)) == wanted
    assert "model.mean" in (tmp_path / "log.txt").read_text()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's call
@pytest.mark.parametrize("adapter", trainers.ADAPTERS)
def test_an_adapter(libraries, undisturbed, tmp_path, adapter):
    """An adapter is saved alone, with the names of PEFT, which opens it; an adapter that lacks a tensor is refused."""
    arguments = {"adapter": adapter, "save_total_limit": None, "load_best_model_at_end": adapter == "lora"}
    wanted = undisturbed(**arguments)
    assert [one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), **arguments)] == ["died"]
    assert ended(play(libraries, tmp_path, **arguments)) == wanted
    path = tmp_path / "out" / "checkpoint-20"
    assert (path / "adapter_model.safetensors").exists()
    assert not (path / "model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(trainers.model_of(), path)
    stored = load_file(path / "adapter_model.safetensors")
    found = peft.get_peft_model_state_dict(model)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    # Turn the checkpoint into that of another adapter.
    state = fastckpt.load(path)
    name = next(iter(state["adapter_model"]))
    del state["adapter_model"][name]
    fastckpt.save(state, path, files=fastckpt.Files(model_key="adapter_model"))
    (outcome,) = play(libraries, tmp_path, resume=str(path), **arguments)
    assert outcome.raised.kind == "StructureMismatchError"
    assert name in outcome.raised.text


def test_a_trainer_that_loads_random_states_itself(libraries, undisturbed, tmp_path):
    """Its own method would find no random states, and a resumed run would have different dropout."""
    arguments = {"kind": trainers.OwnLoader}
    assert [one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), **arguments)] == ["died"]
    assert ended(play(libraries, tmp_path, **arguments)) == undisturbed()


def test_a_model_alone(libraries, tmp_path):
    arguments = {"save_only_model": True, "load_best_model_at_end": False, "save_total_limit": None}
    assert [one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), **arguments)] == ["died"]
    assert sorted(fastckpt.load(tmp_path / "out" / "checkpoint-15")) == ["model"]
    ended(play(libraries, tmp_path, **arguments))
    assert "has the model only" in (tmp_path / "log.txt").read_text()


def test_without_the_line_all_is_as_before_and_its_checkpoints_are_taken(libraries, undisturbed, tmp_path):
    arguments = {"save_total_limit": None}
    outcomes = play(libraries, tmp_path, (KILL, 17, "on_step_end"), installed=False, resume=None, **arguments)
    assert [one.kind for one in outcomes] == ["died"]
    assert (tmp_path / "out" / "checkpoint-15" / "optimizer.pt").exists()
    summary, _ = ended(play(libraries, tmp_path, **arguments))
    # The Trainer's own checkpoint lacks the loss since the last line of the log, and what callbacks counted.
    assert summary["weights"] == undisturbed(**arguments)[0]["weights"]
    assert not (tmp_path / "out" / "checkpoint-15" / "fastckpt.json").exists()
    assert (tmp_path / "out" / "checkpoint-20" / "fastckpt.json").exists()


def test_what_the_door_does_not_do_is_left_to_the_trainer(libraries, tmp_path):
    ended(play(libraries, tmp_path, save_on_each_node=True, max_steps=5))
    assert (tmp_path / "out" / "checkpoint-5" / "optimizer.pt").exists()
    assert "with save_on_each_node, the Trainer saves as it does without fastckpt" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("background", [True, False])
def test_who_reads_a_checkpoint_at_once_finds_it(libraries, tmp_path, background):
    """Training waits for the checkpoint if something reads it; otherwise only with background=False."""
    with libraries.group(1, backend="") as group:
        (found,) = group.run(trainers.readers, str(tmp_path), background=background, timeout=120)
    assert found == {"on_save": [True] * 2, "push": [True] * 2, "neither": [not background] * 2}


def test_a_save_that_fails_ends_the_training(libraries, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-10").touch()
    (outcome,) = play(libraries, tmp_path, save_total_limit=None)
    assert outcome.kind == "raised"
    assert outcome.raised.kind == "FileExistsError"
    assert "checkpoint-10" in outcome.raised.text
    assert steps_of(tmp_path) == [5, 10]


@pytest.mark.slow
def test_fsdp2(libraries, undisturbed, tmp_path):
    wanted = undisturbed(ranks=2, **trainer_kills.FSDP2)
    assert wanted[0]["spread"]
    assert [
        one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), ranks=2, **trainer_kills.FSDP2)
    ] == ["died"] * 2
    assert ended(play(libraries, tmp_path, ranks=2, **trainer_kills.FSDP2)) == wanted
    # One process resumes from the complete checkpoint of both ranks.
    (tmp_path / "out").rename(tmp_path / "two")
    assert [
        one.kind for one in play(libraries, tmp_path, (KILL, 17, "on_step_end"), ranks=2, **trainer_kills.FSDP2)
    ] == ["died"] * 2
    summary, _ = ended(play(libraries, tmp_path))
    assert (summary["step"], summary["spread"]) == (trainers.STEPS, False)
    assert summary["log"][:5] == wanted[0]["log"][:5]
    assert (
        "states of processes (random numbers, samplers, data sets) are not restored"
        in (tmp_path / "log.txt").read_text()
    )


def test_killed_at_random_moments(libraries, tmp_path):
    """The row "kills of trainings" of tests/faults repeats this any number of times."""
    kills = 0
    for more in trainer_kills.campaign(libraries, trainers.train, tmp_path, seed=5):
        kills += more
        if kills >= 4:
            break


def test_the_programs_of_the_page_about_migration(libraries, tmp_path, capsys):
    """Runs the programs of docs/migrate/trainer.md, and its commands on the checkpoint of the first program."""
    with libraries.group(1, backend="") as group:
        (found,) = group.run(trainers.migrated, str(tmp_path), timeout=120)
    assert {name: "fastckpt.json" in files for name, files in found.items()} == {
        "checkpoint-4": False,
        "checkpoint-6": True,
    }
    theirs = load_file(tmp_path / "runs" / "checkpoint-4" / "model.safetensors")
    for number, source in enumerate(("checkpoint-4", "checkpoint-4/model.safetensors")):
        made = tmp_path / f"model-{number}"
        assert f"fastckpt import runs/{source} {made.name}\n" in pages.text("docs/migrate/trainer.md")
        assert cli.main(["import", str(tmp_path / "runs" / source), str(made)]) == 0
        ours = fastckpt.load(made)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "checkpoint-6")
