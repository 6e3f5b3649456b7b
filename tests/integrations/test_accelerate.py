"""accelerate with the integration: a loop that is killed and restarted ends like an undisturbed one.

accelerate has no evaluation, log, best model or handler of SIGTERM: the program has these, and their state.
"""

from __future__ import annotations

import signal
from functools import partial

import accelerated
import pytest
import runs
from runs import ended

import fastckpt
from harness.draws import pairs
from harness.rot import rot

play = partial(runs.play, accelerated.train)
KILL, TERM = signal.SIGKILL, signal.SIGTERM


def killed(libraries, folder, step, point="step", **arguments):
    runs.killed(accelerated.train, libraries, folder, (KILL, step, point), **arguments)


@pytest.fixture(scope="module")
def undisturbed(libraries, tmp_path_factory):
    """Return the end of an undisturbed run, by its arguments."""
    return runs.undisturbed(accelerated.train, libraries, tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"stateful": True}, id="a stateful loader"),
        pytest.param({"accumulation": 3}, id="accumulation"),
        pytest.param({"schedule": "cosine", "background": False}, id="cosine"),
        pytest.param({"ranks": 2}, id="two ranks"),
        pytest.param({"ranks": 2, "lora": True, "accumulation": 2}, id="two ranks, lora, accumulation"),
        pytest.param({"ranks": 2, "fsdp": True}, id="fsdp2"),
    ],
)
def test_a_loop_that_is_killed_ends_as_one_that_is_not(libraries, undisturbed, tmp_path, arguments):
    """Both end with equal weights, log, losses, rows in order, rate, best model, metric and names of checkpoints."""
    wanted = undisturbed(**arguments)[1:]
    assert wanted[0]["spread"] == arguments.get("fsdp", False)
    killed(libraries, tmp_path, 13, **arguments)  # in the middle of an epoch
    killed(libraries, tmp_path, 25, "evaluated", **arguments)  # between the evaluation and the save
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (20, [*wanted])
    # The loop starts again after its end.
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (accelerated.STEPS, [*wanted])


@pytest.mark.parametrize(
    ("strike", "began"),
    [
        pytest.param((KILL, 40, "evaluated"), 35, id="killed at the last step"),
        pytest.param((KILL, 40, "ended"), 40, id="killed when all is done"),
        pytest.param((TERM, 19, "step"), 19, id="stopped"),
        pytest.param((TERM, 40, "step"), 40, id="stopped at the last step"),
    ],
)
def test_an_end_that_comes_early(libraries, undisturbed, tmp_path, strike, began):
    """The loop runs on two ranks, with an adapter and accumulation."""
    arguments = {"ranks": 2, "lora": True, "accumulation": 2}
    wanted = undisturbed(**arguments)[1]
    first = play(libraries, tmp_path, strike, **arguments)
    assert [one.kind for one in first] == ["died" if strike[0] == KILL else "returned"] * 2
    for start in (began, accelerated.STEPS):
        assert ended(play(libraries, tmp_path, **arguments))[:2] == (start, wanted)


LOADERS = {
    "the program skips": {},
    "a stateful loader": {"stateful": True, "workers": 2},
    "split batches": {"stateful": True, "split": True},
}


@pytest.mark.parametrize(("ranks", "loader"), pairs([(2, 1), (1, 2)], LOADERS), ids=str)
def test_another_number_of_processes_goes_on(libraries, undisturbed, tmp_path, ranks, loader):
    """No row is left out; rows of a batch that was cut are seen again. The schedule depends on the number of rows."""
    before, after = ranks
    arguments = LOADERS[loader]
    first = ended(play(libraries, tmp_path, ranks=before, last=25, **arguments))[1]
    began, found, _ = ended(play(libraries, tmp_path, ranks=after, last=30, **arguments))
    assert (began, found["losses"][:25]) == (25, first["losses"])
    alone = undisturbed(last=60, **arguments)[1]["rows"]
    taken, step = (100, 4) if arguments.get("split") else (100 * before, 4 * after)
    cut = taken % accelerated.ROWS % step
    assert found["rows"] == alone[:taken] + alone[taken - cut :][: 5 * step]
    assert found["schedule"] == (taken + 5 * step) / accelerated.BATCH
    told = (tmp_path / "log.txt").read_text()
    assert "states of processes (random numbers, samplers, data sets) are not restored" in told
    assert ("schedules count rows, as accelerate does" in told) != arguments.get("split", False)


def test_the_newest_that_verifies_is_taken_and_the_damaged_one_replaced(libraries, undisturbed, tmp_path):
    killed(libraries, tmp_path, 22)
    path = tmp_path / "checkpoints" / "checkpoint_3"
    rot(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)
    began, *found = ended(play(libraries, tmp_path, limit=None))
    assert (began, found[0]) == (15, undisturbed()[1])
    assert "checkpoint_3 cannot be loaded and is skipped" in (tmp_path / "log.txt").read_text()
    assert fastckpt.verify(path).ok


def test_a_checkpoint_is_one_of_fastckpt(libraries, tmp_path):
    ended(play(libraries, tmp_path, limit=None))
    path = tmp_path / "checkpoints" / "checkpoint_7"
    assert sorted(one.name for one in path.parent.iterdir()) == [f"checkpoint_{number}" for number in range(8)]
    assert fastckpt.verify(path).ok
    state = fastckpt.load(path)
    assert sorted(state) == ["model", "optimizer", "registered", "scheduler"]
    assert state["registered"]["step"] == accelerated.STEPS


def test_another_number_of_registered_objects_is_an_error(libraries, tmp_path):
    ended(play(libraries, tmp_path, last=5))
    (outcome,) = play(libraries, tmp_path, registered=2)
    assert outcome.raised.kind == "RuntimeError"
    assert "has 1 registered objects, and 2 are registered" in outcome.raised.text


def test_checkpoints_of_accelerate_are_taken_and_stay_until_newer_ones_are_there(libraries, undisturbed, tmp_path):
    killed(libraries, tmp_path, 22, installed=False, limit=None)
    folder = tmp_path / "checkpoints"
    assert (folder / "checkpoint_3" / "optimizer.bin").exists()
    (folder / "checkpoint_best").mkdir()
    killed(libraries, tmp_path, 27, limit=3)
    assert (tmp_path / "checkpoints" / "checkpoint_4" / "fastckpt.json").exists()
    assert not (folder / "checkpoint_3" / "fastckpt.json").exists()
    began, found, left = ended(play(libraries, tmp_path, limit=3))
    assert (began, found) == (25, undisturbed()[1])
    assert left == [*(f"checkpoint_{number}" for number in (5, 6, 7)), "checkpoint_best"]


def test_a_stateful_loader_is_where_it_was(libraries, tmp_path):
    """A loader keeps its position even if it is saved again before its next batch, or has ended."""
    ((found, wanted),) = once(libraries, accelerated.saved_again, tmp_path)
    assert found == wanted


def once(libraries, function, folder, ranks=1, **options):
    """Return the results of a function on each rank."""
    with libraries.group(ranks, backend="gloo" if ranks > 1 else "") as group:
        return group.run(function, str(folder), timeout=120, **options)


def test_what_is_registered_may_differ_by_process(libraries, tmp_path):
    """As with accelerate, the state of the main process is saved, and all processes load it."""
    for rank in range(2):
        (tmp_path / f"scratch-{rank}").mkdir()
    wanted = {"seen": {"row-0": 0}, "losses": [0.5], "mean": [1.0, 1.0]}
    assert once(libraries, accelerated.own_values, tmp_path, 2) == [wanted, wanted]


def test_nothing_is_loaded_where_all_are_damaged(libraries, tmp_path):
    """Mutant: accelerate loads the newest checkpoint, although it is damaged."""
    (error,) = once(libraries, accelerated.damaged, tmp_path)
    assert "checkpoint_0" in error


def test_what_happens_to_one_process_is_known_to_all(libraries, tmp_path):
    """Mutant: a process without an error continues, and its next collective call meets a different call."""
    found = once(libraries, accelerated.alone, tmp_path / "damage", 2, kind="CorruptCheckpointError", raised="rotten")
    assert found == [{"number": 0}, {"number": 0}]
    well, ill = once(libraries, accelerated.alone, tmp_path / "other", 2, kind="RuntimeError", raised="out of memory")
    assert ill == ("RuntimeError", "out of memory")
    assert well[0] == "RanksError"
    assert "rank 1" in well[1]
    assert "RuntimeError: out of memory" in well[1]


def test_hooks_dtypes_and_strict(libraries, tmp_path):
    ((path, seen),) = once(libraries, accelerated.loaded_otherwise, tmp_path)
    assert seen == [(1, path), True, False, "differs", True]


def test_training_ends_although_the_last_save_failed(libraries, tmp_path):
    assert once(libraries, accelerated.at_the_end, tmp_path) == [("the disk is gone", [True])]


@pytest.mark.parametrize("background", [True, False])
def test_a_directory_in_use_is_left_alone(libraries, tmp_path, background):
    ((named, numbered),) = once(libraries, accelerated.refused, tmp_path, background=background)
    assert "logs" in named
    assert "checkpoint_0 exists: set project_configuration.iteration" in numbered
    for name in ("used", "checkpoints/checkpoint_0"):
        assert (tmp_path / name / "logs" / "events").read_text() == "mine"
    assert fastckpt.verify(tmp_path / "free").ok
