"""accelerate with the door: a loop that is killed and started again ends as one that nothing disturbed."""

from __future__ import annotations

from functools import partial

import accelerated
import pytest
import runs
from runs import ended

import fastckpt

play = partial(runs.play, accelerated.train)


def killed(libraries, folder, strike, *, ranks=1, **arguments):
    assert [one.kind for one in play(libraries, folder, strike, ranks=ranks, **arguments)] == ["died"] * ranks


@pytest.fixture(scope="module")
def undisturbed(libraries, tmp_path_factory):
    """How a run ends that nothing disturbs, by its arguments."""
    return runs.undisturbed(accelerated.train, libraries, tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"stateful": True}, id="a stateful loader"),
        pytest.param({"accumulation": 3}, id="accumulation"),
        pytest.param({"schedule": "cosine", "background": False}, id="cosine"),
        pytest.param({"ranks": 2}, id="two ranks"),
        pytest.param({"ranks": 2, "fsdp": True}, id="fsdp2"),
    ],
)
def test_a_loop_that_is_killed_ends_as_one_that_is_not(libraries, undisturbed, tmp_path, arguments):
    """Weights, losses, rows in their order, and the rate; and it leaves the same checkpoints."""
    wanted = undisturbed(**arguments)[1:]
    assert wanted[0]["spread"] == arguments.get("fsdp", False)
    for strike in (13, 22):  # in the middle of an epoch; and one more
        killed(libraries, tmp_path, strike, **arguments)
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (20, [*wanted])
    # Once more, after its end.
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (accelerated.STEPS, [*wanted])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(libraries, tmp_path, before, after):
    _, found, _ = ended(play(libraries, tmp_path, ranks=before, last=10))
    began, again, _ = ended(play(libraries, tmp_path, ranks=after, last=10))
    assert (began, again["weights"]) == (10, found["weights"])
    assert "random states and loaders of processes are not restored" in (tmp_path / "log.txt").read_text()


def test_the_newest_that_verifies_is_taken_and_the_damaged_one_replaced(libraries, undisturbed, tmp_path):
    killed(libraries, tmp_path, 22)
    path = tmp_path / "checkpoints" / "checkpoint_3"
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    began, *found = ended(play(libraries, tmp_path, limit=None))
    assert (began, found[0]) == (15, undisturbed()[1])
    assert "checkpoint_3 is damaged" in (tmp_path / "log.txt").read_text()
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


def test_a_directory_in_use_is_left_alone(libraries, tmp_path):
    with libraries.group(1, backend="") as group:
        ((named, numbered),) = group.run(accelerated.refused, str(tmp_path), timeout=120)
    assert "logs" in named
    assert "checkpoint_0 exists: set project_configuration.iteration" in numbered
    for name in ("used", "checkpoints/checkpoint_0"):
        assert (tmp_path / name / "logs" / "events").read_text() == "mine"
    assert fastckpt.verify(tmp_path / "free").ok
