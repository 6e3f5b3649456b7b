"""accelerate with the door: a loop that is killed and started again ends as one that nothing disturbed."""

from __future__ import annotations

import json

import accelerated
import pytest
import trainer_kills

import fastckpt


@pytest.fixture(scope="module")
def libraries():
    """Makes groups of processes that have imported accelerate."""
    with trainer_kills.forge() as forge:
        yield forge


def play(libraries, folder, strike=None, *, ranks=1, **arguments):
    folder.mkdir(exist_ok=True)
    with libraries.group(ranks, backend="") as group:
        group.start(accelerated.train, str(folder), strike, **arguments)
        return group.outcomes(120)


def ended(outcomes):
    """The step that it began with, what it trained and what it left, where it ended well on all ranks."""
    assert all(one.kind == "returned" for one in outcomes), outcomes
    return outcomes[0].value


def killed(libraries, folder, strike, *, ranks=1, **arguments):
    assert [one.kind for one in play(libraries, folder, strike, ranks=ranks, **arguments)] == ["died"] * ranks


@pytest.fixture(scope="module")
def undisturbed(libraries, tmp_path_factory):
    """How a loop ends that nothing disturbs, by its arguments."""
    known = {}

    def run(*, ranks=1, **arguments):
        key = json.dumps([ranks, arguments], sort_keys=True)
        if key not in known:
            known[key] = ended(play(libraries, tmp_path_factory.mktemp("undisturbed"), ranks=ranks, **arguments))[1:]
        return known[key]

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"seedable": False}, id="a generator"),
        pytest.param({"accumulation": 3}, id="accumulation"),
        pytest.param({"skips": True}, id="skips itself"),
        pytest.param({"schedule": "cosine", "background": False}, id="cosine"),
        pytest.param({"ranks": 2}, id="two ranks"),
        pytest.param({"ranks": 2, "seedable": False}, id="two ranks, a generator"),
        pytest.param({"ranks": 2, "fsdp": True}, id="fsdp2"),
    ],
)
def test_a_loop_that_is_killed_ends_as_one_that_is_not(libraries, undisturbed, tmp_path, arguments):
    """Weights, losses, rows in their order, and the rate; and it leaves the same checkpoints."""
    wanted = undisturbed(**arguments)
    assert wanted[0]["spread"] == arguments.get("fsdp", False)
    for strike in (13, 22):  # in the middle of an epoch; and one more
        killed(libraries, tmp_path, strike, **arguments)
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (20, [*wanted])
    # Once more, after its end.
    began, *found = ended(play(libraries, tmp_path, **arguments))
    assert (began, found) == (accelerated.STEPS, [*wanted])


@pytest.mark.parametrize("schedule", accelerated.SCHEDULES)
@pytest.mark.parametrize(("before", "last", "after"), [(2, 5, 1), (1, 10, 2)])
def test_another_number_of_processes_goes_on(libraries, tmp_path, schedule, before, last, after):
    """No row of the epoch comes again or is left out, and the schedule ends with the run."""
    ended(play(libraries, tmp_path, ranks=before, last=last, schedule=schedule))
    began, found, _ = ended(play(libraries, tmp_path, ranks=after, schedule=schedule))
    assert began == last
    epoch = found["rows"][: accelerated.ROWS]
    assert sorted(epoch) == list(range(accelerated.ROWS))
    assert found["rate"][0] == pytest.approx(0, abs=1e-9)
    assert "random states of processes are not restored" in (tmp_path / "log.txt").read_text()


def test_the_newest_that_verifies(libraries, undisturbed, tmp_path):
    killed(libraries, tmp_path, 22)
    shard = tmp_path / "checkpoints" / "checkpoint_3" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    began, *found = ended(play(libraries, tmp_path))
    assert (began, found) == (15, [*undisturbed()])
    assert "checkpoint_3 is damaged" in (tmp_path / "log.txt").read_text()


def test_a_checkpoint_is_one_of_fastckpt(libraries, tmp_path):
    ended(play(libraries, tmp_path, limit=None))
    path = tmp_path / "checkpoints" / "checkpoint_7"
    assert sorted(one.name for one in path.parent.iterdir()) == [f"checkpoint_{number}" for number in range(8)]
    assert fastckpt.verify(path).ok
    state = fastckpt.load(path)
    assert sorted(state) == ["model", "optimizer", "registered"]
    assert state["registered"]["step"] == accelerated.STEPS


def test_checkpoints_of_accelerate_are_taken(libraries, undisturbed, tmp_path):
    """It saves the loaders' places and the schedule's pace by itself no better than without the door."""
    killed(libraries, tmp_path, 12, installed=False)
    assert (tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin").exists()
    began, found, _ = ended(play(libraries, tmp_path))
    assert began == 10
    assert found["losses"][:10] == undisturbed()[0]["losses"][:10]
