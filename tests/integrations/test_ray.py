"""Ray Train's integration against a stand-in with Ray's interface: ray_by_hand.py runs it in Ray itself."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt.integrations import ray as door
from harness import pages


class Train(types.ModuleType):
    """The part of ``ray.train`` that the integration calls, for one worker."""

    CheckpointUploadMode = types.SimpleNamespace(NO_UPLOAD="NO_UPLOAD")
    CheckpointConsistencyMode = types.SimpleNamespace(COMMITTED="COMMITTED")
    ScalingConfig = RunConfig = CheckpointConfig = FailureConfig = types.SimpleNamespace

    def __init__(self, run):
        super().__init__("ray.train")
        self.rank, self.known, self.news, self.reported = 0, [], None, []
        self.storage = types.SimpleNamespace(experiment_fs_path=str(run), storage_filesystem=object())

    def Checkpoint(self, path, filesystem):  # noqa: N802
        assert filesystem is self.storage.storage_filesystem
        assert path.startswith(f"{self.storage.experiment_fs_path}/"), "Ray compares the text of paths"
        return types.SimpleNamespace(path=path)

    def get_context(self):
        return types.SimpleNamespace(get_world_rank=lambda: self.rank, get_storage=lambda: self.storage)

    def get_all_reported_checkpoints(self, *, consistency_mode):
        assert consistency_mode == "COMMITTED"
        return [types.SimpleNamespace(checkpoint=types.SimpleNamespace(path=path)) for path in self.known]

    def get_preemption_info(self):
        return self.news

    def report(self, metrics, checkpoint=None, *, checkpoint_upload_mode="SYNC"):
        assert checkpoint_upload_mode == "NO_UPLOAD"
        self.known += [checkpoint.path] if checkpoint else []
        self.reported.append((metrics["step"], checkpoint and checkpoint.path))


@pytest.fixture
def train(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    made, package = Train(tmp_path / "link"), types.ModuleType("ray")
    package.train = made
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.train", made)
    importlib.reload(door)  # as in a new process
    return made


def test_each_checkpoint_is_reported_once_when_it_is_durable(train, tmp_path):
    """Mutant: a checkpoint is reported again, and Ray removes it together with the older report."""
    with fastckpt.Manager(tmp_path / "steps", save_when=3) as manager:
        for step in range(1, 8):
            if manager.save(step, {"weight": torch.ones(3)}):
                manager.wait()
            door.report({"step": step}, manager)
    paths = [str(tmp_path / "link" / "steps" / f"step-{step:08d}") for step in (3, 6)]
    assert train.reported == [(1, None), (2, None), (3, paths[0]), (4, None), (5, None), (6, paths[1]), (7, None)]
    # After a restart, Ray knows these checkpoints, perhaps by another path; another worker reports none.
    importlib.reload(door)
    train.known = [str(tmp_path / "steps" / "step-00000006")]
    door.report({"step": 8}, manager)
    importlib.reload(door)
    train.rank, train.known = 1, []
    door.report({"step": 9}, manager)
    assert train.reported[-2:] == [(8, None), (9, None)]


def test_a_run_that_goes_back_reports_no_path_again(train, tmp_path):
    """Mutant: Ray removes the run's new save together with the old one."""
    state = {"weight": torch.ones(3)}
    with fastckpt.Manager(tmp_path / "steps") as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
            manager.wait()
            door.report({"step": step}, manager)
        manager.restore(step=1)
        importlib.reload(door)
        for step in (2, 3, 4):
            manager.save(step, state, force=True)
            manager.wait()
            door.report({"step": step}, manager)
    assert len(train.known) == 4
    assert {*train.known} == {str(path) for path in tmp_path.glob("link/steps/step-*")}


def test_what_was_not_restored_is_not_reported(train, tmp_path):
    """A damaged or abandoned checkpoint is not reported: Ray would remove a good checkpoint for it."""
    state = {"weight": torch.ones(3)}
    with fastckpt.Manager(tmp_path / "steps") as manager:
        for step in (1, 2):
            state["weight"] += 1
            manager.save(step, state)
            manager.wait()
    (tmp_path / "steps" / "step-00000002" / "model.safetensors").write_bytes(b"")
    importlib.reload(door)
    with fastckpt.Manager(tmp_path / "steps") as manager:
        with pytest.warns(RuntimeWarning, match="cannot be loaded"):
            assert manager.restore(into=state).step == 1
        door.report({"step": 1}, manager)
        manager.save(2, state, force=True)
        manager.wait()
        door.report({"step": 2}, manager)
    importlib.reload(door)
    with fastckpt.Manager(tmp_path / "steps") as manager:
        manager.restore(into=state)
        train.known = []
        door.report({"step": 3}, manager)
    path = str(tmp_path / "link" / "steps" / "step-00000002")
    assert train.reported == [(1, None), (2, path), (3, path)]


def test_one_side_alone_removes_checkpoints(train, tmp_path):
    with (
        fastckpt.Manager(tmp_path, keep=2) as manager,
        pytest.raises(ValueError, match=r"report: .*leave out keep=, and give Ray num_to_keep"),
    ):
        door.report({"step": 1}, manager)
    assert train.reported == []


def test_each_news_of_a_preemption_is_told_once(train, tmp_path):
    saved = []
    with fastckpt.Manager(tmp_path, save_when=100) as manager:
        manager.save_on(notice=train.get_preemption_info)
        for step in range(1, 8):
            train.news = {3: {"deadline_ms": 1}, 6: {"deadline_ms": 2}}.get(step, train.news)
            if manager.save(step, {"weight": torch.ones(3)}):
                saved.append(step)
    assert saved == [3, 6]


def test_the_program_of_the_guide(train):
    def trainer(function, **_):
        return types.SimpleNamespace(fit=lambda: function({}))

    (program,) = pages.python("docs/guides/ray.md")
    names = {
        "TorchTrainer": trainer,
        "make_state": lambda: {"weight": torch.ones(3)},
        "train_step": lambda state: float(state["weight"].sum()),
    }
    exec(program.replace("10_000", "300"), names)
    assert [step for step, _ in train.reported] == [*range(10, 301, 10), 300]
    assert train.known[-1].endswith("/steps/step-00000300")


def test_the_program_of_the_examples(train, monkeypatch, capsys):
    """The program continues where it stopped; started after its end, it takes no step."""

    def trainer(function, *, train_loop_config, scaling_config, run_config):
        def fit():
            function(train_loop_config)
            return types.SimpleNamespace(metrics={"step": train.reported[-1][0]})

        assert (scaling_config.num_workers, run_config.name) == (2, "ray")
        assert Path(run_config.storage_path) == Path("runs").absolute()
        return types.SimpleNamespace(fit=fit)

    train.torch = types.SimpleNamespace(TorchTrainer=trainer, prepare_model=lambda model: model)
    monkeypatch.setitem(sys.modules, "ray.train.torch", train.torch)
    program = Path(__file__).parents[2] / "examples" / "doors" / "ray_train.py"
    for steps, reports in ((20, 21), (20, 1), (40, 21)):
        importlib.reload(door)
        before = len(train.reported)
        monkeypatch.setattr(sys, "argv", [str(program), str(steps)])
        runpy.run_path(str(program), run_name="__main__")
        assert capsys.readouterr().out == f"ended at step {steps}\n"
        assert len(train.reported) - before == reports
    assert [Path(path).name for path in train.known] == [f"step-{step:08d}" for step in (10, 20, 30, 40)]
