"""Lightning with the plugin: a training that is killed and restarted ends like an undisturbed one."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import signal
import weakref
from functools import partial
from types import SimpleNamespace

import lit
import pytest
import runs
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from runs import ended

import fastckpt
from fastckpt.integrations.lightning import CheckpointIO, RandomStates
from harness.rot import rot

play = partial(runs.play, lit.train)
KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def undisturbed(libraries, tmp_path_factory):
    """Return the end of an undisturbed run, by its arguments."""
    return runs.undisturbed(lit.train, libraries, tmp_path_factory.mktemp)


def killed(libraries, folder, step, point="on_train_batch_end", **arguments):
    runs.killed(lit.train, libraries, folder, (KILL, step, point), **arguments)


ADAPTED = {"evaluates": True, "lora": True, "accumulation": 2, "last": 18}


@pytest.mark.parametrize(
    ("steps", "began", "arguments"),
    [
        pytest.param((13, 22), 20, {}, id="plain"),
        pytest.param((13, 22), 20, {"background": False}, id="not in the background"),
        pytest.param((13, 22), 20, {"ranks": 2}, id="two ranks"),
        pytest.param((7, 12), 10, ADAPTED, id="lora, accumulation"),
        pytest.param((7, 12), 10, {"ranks": 2, **ADAPTED}, id="two ranks, lora, accumulation"),
    ],
)
def test_a_training_that_is_killed_ends_as_one_that_is_not(libraries, undisturbed, tmp_path, steps, began, arguments):
    """Both trainings end with equal weights, log, best model and score, and leave the same checkpoints."""
    start, *wanted = undisturbed(**arguments)
    assert start == 0
    for strike in steps:  # in the middle of an epoch
        killed(libraries, tmp_path, strike, **arguments)
    assert ended(play(libraries, tmp_path, **arguments)) == (began, *wanted)
    for path in (tmp_path / "checkpoints").iterdir():
        assert fastckpt.verify(path).ok
    # Started again after its end, the training repeats the steps since the last checkpoint.
    start = arguments.get("last", lit.STEPS) // 5 * 5
    assert ended(play(libraries, tmp_path, **arguments)) == (start, *wanted)


@pytest.mark.parametrize(
    ("strike", "began"),
    [
        pytest.param((KILL, 25, "on_validation_end"), 20, id="between the evaluation and the save"),
        pytest.param((KILL, 36, "on_train_batch_end"), 35, id="killed at the last step"),
        pytest.param((KILL, 36, "on_train_end"), 35, id="killed when all is done"),
        pytest.param((TERM, 19, "on_train_batch_end"), 19, id="stopped"),
        pytest.param((TERM, 36, "on_train_batch_end"), None, id="stopped at the last step"),
    ],
)
def test_an_end_that_comes_early(libraries, undisturbed, tmp_path, strike, began):
    """Weights, log, best model and score are equal; in addition, ModelCheckpoint leaves its save for a stop."""
    _, wanted, left = undisturbed(evaluates=True)
    (first,) = play(libraries, tmp_path, strike, evaluates=True)
    assert first.kind == ("died" if strike[0] == KILL else "raised")
    # Started again after its end, the training begins at step 35, or does nothing if Lightning saved the end.
    for starts in ({began}, {35, None}):
        start, found, there = ended(play(libraries, tmp_path, evaluates=True))
        assert start in starts
        assert found == wanted
        assert {*left} <= {*there}


@pytest.mark.parametrize("arguments", [{}, {"second": True}, {"epochs": True}], ids=["plain", "two", "epochs"])
def test_it_is_what_lightning_does_by_itself(libraries, undisturbed, arguments):
    """With and without the plugin, training, decisions and names are the same, even of checkpoints in flight."""
    assert undisturbed(installed=False, **arguments) == undisturbed(**arguments)


def test_random_states_are_those_of_the_run_that_loads_them():
    """Mutant: a later fit gets the random states of a checkpoint that was validated."""
    states, saved = RandomStates(), {}
    trainer = SimpleNamespace(world_size=1, global_rank=0, state=TrainerState())
    states.on_save_checkpoint(trainer, None, saved)
    for fn, restored in ((TrainerFn.VALIDATING, False), (TrainerFn.FITTING, True)):
        trainer.state.fn = fn
        states.setup(trainer, None, "fit")
        states.on_load_checkpoint(trainer, None, saved)
        torch.manual_seed(77)
        before = torch.get_rng_state()
        trainer.state.fn = TrainerFn.FITTING
        states.on_fit_start(trainer, None)
        assert torch.equal(before, torch.get_rng_state()) != restored
    states.setup(trainer, None, "fit")
    before = torch.get_rng_state()
    states.on_fit_start(trainer, None)
    assert torch.equal(before, torch.get_rng_state())


def test_a_plugin_goes_to_other_processes(tmp_path):
    plugin = pickle.loads(pickle.dumps(CheckpointIO(background=False)))
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "c.ckpt")
    assert plugin.load_checkpoint(tmp_path / "c.ckpt") == {"epoch": 1}


def test_strategies_that_read_files_of_torch_write_them(tmp_path):
    class First(FSDPStrategy):
        is_global_zero = True

    strategy = First.__new__(First)
    strategy._checkpoint_io = CheckpointIO()
    Strategy.save_checkpoint(strategy, {"epoch": 1}, tmp_path / "c.ckpt")
    CheckpointIO().save_checkpoint({"epoch": 2}, tmp_path / "hpc_ckpt_1.ckpt")
    assert [torch.load(tmp_path / name)["epoch"] for name in ("c.ckpt", "hpc_ckpt_1.ckpt")] == [1, 2]


@pytest.mark.parametrize("arguments", [{"save_last": "link"}, {"epochs": True}], ids=["link", "epochs"])
def test_it_goes_on_as_lightning_does(libraries, tmp_path, arguments):
    """Links lead to the last of the best, not to the last; after the end of an epoch, one without batches begins."""
    ends = []
    for name, installed in (("ours", True), ("theirs", False)):
        for strike in (13, 22):
            killed(libraries, tmp_path / name, strike, installed=installed, **arguments)
        ends.append(ended(play(libraries, tmp_path / name, installed=installed, **arguments)))
    assert ends[0] == ends[1]
    assert (tmp_path / "ours" / "checkpoints" / "last.ckpt").is_symlink() == ("save_last" in arguments)


def test_a_checkpoint_is_one_of_fastckpt(libraries, undisturbed, tmp_path):
    ended(play(libraries, tmp_path))
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert {"model.safetensors", "fastckpt.json"} <= {one.name for one in path.iterdir()}
    assert "net.0.weight" in fastckpt.load(path, keys="state_dict")["state_dict"]
    with libraries.group(1, backend="") as group:
        ((width, weights),) = group.run(lit.load, str(tmp_path), "last.ckpt")
    assert width == 32
    state = fastckpt.load(path)["state_dict"]
    module = torch.nn.Module()
    module.state_dict = lambda: state
    assert weights == runs.digest(module)[0]


def test_a_run_of_lightning_goes_on(libraries, undisturbed, tmp_path):
    """The file that torch wrote is read, and stays until its replacement is durable."""
    killed(libraries, tmp_path, 22, installed=False)
    folder = tmp_path / "checkpoints"
    assert (folder / "last.ckpt").is_file()
    began, *found = ended(play(libraries, tmp_path))
    assert (began, found) == (20, list(undisturbed()[1:]))
    assert fastckpt.verify(folder / "last.ckpt").ok


def test_a_damaged_checkpoint_is_an_error(libraries, tmp_path):
    killed(libraries, tmp_path, 22)
    path = tmp_path / "checkpoints" / "last.ckpt" / "model.safetensors"
    rot(path, path.stat().st_size - 1)
    (outcome,) = play(libraries, tmp_path)
    assert outcome.raised.kind == "CorruptCheckpointError"


# --- the plugin by itself ------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Return a plugin whose saves end when the test lets them, and the list of these saves."""
    saves = []

    class Save:
        def __init__(self, state, path):
            self.error, self.state, self.path = None, state, str(path)
            saves.append(self)

        def add_done_callback(self, function):
            self.function = function

        def done(self):
            return self.error is not None or self.state is None

        def progress(self):
            return SimpleNamespace(phase="failed" if self.error else "writing" if self.state else "done")

        def exception(self):
            if self.error is None and self.state is not None:
                fastckpt.save(self.state, self.path)
                self.state = None
                self.function(self)
            return self.error

        def result(self):
            try:
                if self.exception() is not None:
                    raise self.error
            finally:
                del self  # as a real save does

    monkeypatch.setattr(fastckpt, "save_async", lambda state, path, **_: Save(state, path))
    return CheckpointIO(), saves


def save(plugin, state, path, **how):
    """Save as ModelCheckpoint does during training; return the trainer and the ModelCheckpoint."""
    strategy = SimpleNamespace(
        checkpoint_io=plugin, reduce_boolean_decision=lambda told, **_: told, barrier=lambda: None
    )
    trainer = SimpleNamespace(strategy=strategy, state=TrainerState(), loggers=[], is_global_zero=True, global_step=1)
    trainer.save_checkpoint = lambda path, _: plugin.save_checkpoint(state, path)
    checkpoints = ModelCheckpoint(**how)
    checkpoints._save_checkpoint(trainer, str(path))
    return trainer, checkpoints


def test_nothing_goes_before_what_was_saved_before_it_is_durable(slow, tmp_path):
    """Mutant: removals happen immediately."""
    plugin, saves = slow
    for number in range(3):
        trainer, checkpoints = save(plugin, {"epoch": number}, tmp_path / f"{number}.ckpt")
        if number:
            plugin.remove_checkpoint(tmp_path / f"{number - 1}.ckpt")
    there = [checkpoints.file_exists(str(tmp_path / f"{name}.ckpt"), trainer) for name in (0, 2, 3)]
    assert there == [False, True, False], "as without saves in the background"
    saves[0].exception()
    plugin.remove_checkpoint(tmp_path / "nothing.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["0.ckpt"]
    saves[1].exception()
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"], "it is removed as soon as possible"
    assert plugin.load_checkpoint(tmp_path / "2.ckpt") == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["2.ckpt"]


def test_the_first_checkpoint_of_a_directory_is_waited_for(slow, tmp_path):
    """Lightning creates links beside the checkpoint, and never makes the directory later."""
    plugin, _ = slow
    for number, is_there in enumerate((True, False)):
        save(plugin, {"epoch": number}, tmp_path / "run" / f"{number}.ckpt")
        assert (tmp_path / "run" / f"{number}.ckpt").exists() == is_there


def test_a_link_is_never_to_what_is_not_there(slow, tmp_path):
    """Mutant: a run that is killed during the save begins anew."""
    plugin, _ = slow
    for number, how in enumerate(({}, {"save_last": "link"})):
        trainer, checkpoints = save(plugin, {"epoch": number}, tmp_path / f"{number}.ckpt", **how)
        assert (tmp_path / f"{number}.ckpt").exists() == bool(how)
    checkpoints._link_checkpoint(trainer, str(tmp_path / "1.ckpt"), str(tmp_path / "last.ckpt"))
    assert (tmp_path / "last.ckpt").is_symlink()
    assert fastckpt.load(tmp_path / "last.ckpt") == {"epoch": 1}


def test_what_a_failed_save_was_to_replace_stays(slow, tmp_path):
    plugin, saves = slow
    plugin.save_checkpoint({"epoch": 0}, tmp_path / "0.ckpt")
    assert (tmp_path / "0.ckpt").exists(), "a checkpoint that ModelCheckpoint does not save exists at once"
    save(plugin, {"epoch": 1}, tmp_path / "1.ckpt")
    plugin.remove_checkpoint(tmp_path / "0.ckpt")
    saves[0].error = OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        plugin.save_checkpoint({"epoch": 2}, tmp_path / "2.ckpt")
    plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "0.ckpt") == {"epoch": 0}


def test_a_save_that_ends_meanwhile_hides_no_other(slow, tmp_path):
    """Mutant: the wait reads the saves from a list that the thread of a save shortens."""
    plugin, saves = slow
    for number in range(2):
        save(plugin, {"epoch": number}, tmp_path / f"{number}.ckpt")

    class Read(tuple):
        __slots__ = ()

        def __iter__(self):
            saves[0].exception()  # ends the save
            return super().__iter__()

    plugin._queue[0] = Read(plugin._queue[0])
    plugin.teardown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.ckpt", "1.ckpt"]


def test_a_failure_that_was_caught_keeps_no_state(slow, tmp_path):
    """Mutant: the frame that raises the error also refers to it, in a cycle with the state of the next save."""
    plugin, saves = slow
    save(plugin, {"epoch": 0}, tmp_path / "0.ckpt")
    saves.pop().error = OSError("the disk is gone")

    class State(dict):
        pass

    def fails():
        state = State(epoch=1)
        with contextlib.suppress(OSError):
            plugin.save_checkpoint(state, tmp_path / "1.ckpt")
        return weakref.ref(state)

    gc.collect()
    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


class Buffered(CheckpointIO):
    """Takes other arguments."""

    def __init__(self):
        super().__init__(io="buffered", background=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_subclass_goes_to_another_process(copied, tmp_path):
    plugin = copied(Buffered())
    assert (plugin._io.engine, plugin._io.max_in_flight, plugin._background) == ("buffered", 2, False)
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "1.ckpt")
    assert plugin.load_checkpoint(tmp_path / "1.ckpt") == {"epoch": 1}


def test_files_of_torch_and_other_places_are_as_without_it(tmp_path):
    plugin = CheckpointIO(background=False)
    torch.save({"epoch": 1}, tmp_path / "torch.ckpt")
    assert plugin.load_checkpoint(tmp_path / "torch.ckpt") == {"epoch": 1}
    plugin.save_checkpoint({"epoch": 2}, "memory://run/2.ckpt")
    assert plugin.load_checkpoint("memory://run/2.ckpt") == {"epoch": 2}
    plugin.remove_checkpoint("memory://run/2.ckpt")
    plugin.save_checkpoint({"epoch": 3}, tmp_path / "torch.ckpt")
    assert plugin.load_checkpoint(tmp_path / "torch.ckpt", map_location="cpu") == {"epoch": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["torch.ckpt"]
    for gone in ("memory://run/2.ckpt", tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError):
            plugin.load_checkpoint(gone)
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "c.ckpt", {"any": 1})
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError):
        plugin.save_checkpoint({"loss": open}, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match="CheckpointIO: io must be one of"):
        CheckpointIO(io="fast")


def test_the_programs_of_the_page_about_migration(libraries, tmp_path):
    """The programs of docs/migrate/lightning.md save Lightning's file, a directory of fastckpt, and a file again."""
    with libraries.group(1, backend="") as group:
        assert group.run(lit.migrated, str(tmp_path), timeout=120) == [[(4, False), (8, True), (12, True)]]
