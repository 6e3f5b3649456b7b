"""Units of the integrations: their search in a directory of checkpoints, and trainers with saves in the background."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trl
from transformers import Trainer

import fastckpt
from fastckpt._manager import crew
from fastckpt.integrations import _directory, _processes
from fastckpt.integrations import transformers as door


@pytest.fixture
def steps(tmp_path):
    """Checkpoints 1 to 5; another writer made the fourth."""
    paths = [tmp_path / f"checkpoint-{step}" for step in range(1, 6)]
    for path in paths:
        if path.name == "checkpoint-4":
            path.mkdir()
            (path / "optimizer.pt").touch()
        else:
            fastckpt.save({"step": 1}, path, files={"config.json": "{}"})
    return [str(path) for path in paths]


def left(steps, limit, protected=()):
    _directory.keep(limit, {None, *protected}, steps)
    folder = Path(steps[0]).parent
    return "".join(sorted(path.name[-1] for path in folder.iterdir()))


@pytest.mark.parametrize(
    ("limit", "protected", "wanted"),
    [
        (None, "", "12345"),
        (0, "", "12345"),
        (-1, "", "12345"),
        (5, "", "12345"),
        (9, "", "12345"),
        (2, "", "45"),
        (1, "", "5"),
        (2, "1", "15"),
        (1, "15", "15"),
        (1, "12", "12"),
        (3, "12", "125"),
    ],
)
def test_the_oldest_go_but_none_that_is_protected(steps, limit, protected, wanted):
    assert left(steps, limit, [steps[int(one) - 1] for one in protected]) == wanted


def test_a_checkpoint_that_is_saved_twice_counts_once(steps):
    assert left([*steps, steps[4]], 4, [steps[4]]) == "2345"


def test_the_newest_comes_first(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-best", "checkpoint-best-12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    found = _directory.newest_first(tmp_path, "checkpoint-", "state.json")
    assert [path.rpartition("-")[2] for path in found] == ["100", "10", "9"]


def test_what_counts_as_ours(tmp_path):
    fastckpt.save({}, tmp_path / "c")
    for path in (tmp_path / "c", str(tmp_path / "c")):
        assert _directory.is_ours(path)
    for other in (tmp_path, None, True, False, tmp_path / "nothing"):
        assert not _directory.is_ours(other)


def test_what_was_moved_aside_goes_with_the_next_sweep(steps, tmp_path):
    _directory.move_aside(steps[3])
    _directory.move_aside(str(tmp_path / "nothing"))
    (tmp_path / ".checkpoint-7.aside-1").mkdir()  # left by a process that was killed
    (tmp_path / ".checkpoint-7.aside-1" / "optimizer.pt").touch()
    (tmp_path / "runs").mkdir()
    aside = [path.name for path in tmp_path.glob(".*")]
    assert len(aside) == 2
    assert any(name.startswith(".checkpoint-4.aside-") for name in aside)
    _directory.sweep(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"checkpoint-{step}" for step in (1, 2, 3, 5)),
        "runs",
    ]


class Plain(Trainer):
    """Adds nothing."""


class Before(Trainer):
    """Does other work first, like most trainers."""

    def _save_checkpoint(self, model, trial):
        self.noted = model
        return super()._save_checkpoint(model, trial)


class After(Before):
    """Reads the checkpoint."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.noted = trial


class Below(After):
    """Inherits from a trainer that reads the checkpoint."""


class Either(Before):
    """Reads the checkpoint unless it has a trial."""

    def _save_checkpoint(self, model, trial):
        if trial is None:
            super()._save_checkpoint(model, trial)
            self.noted = trial
        else:
            super()._save_checkpoint(model, trial)


class Within(Before):
    """Reads the checkpoint when a context ends."""

    def _save_checkpoint(self, model, trial):
        with self.noted:
            super()._save_checkpoint(model, trial)


class Then(Before):
    """Reads the checkpoint in the same statement."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial) or self.noted(trial)


KINDS = {Plain: True, Before: True, After: False, Below: False, Either: False, Within: False, Then: False}


@pytest.mark.parametrize(("kind", "last"), KINDS.items())
def test_which_trainers_do_nothing_after_a_save(kind, last):
    assert door._saves_last(kind) == last


def test_a_trainer_without_source_may_do_anything():
    made = {}
    exec("def _save_checkpoint(self, model, trial):\n    super()._save_checkpoint(model, trial)", made)
    assert not door._saves_last(type("Made", (Trainer,), {"_save_checkpoint": made["_save_checkpoint"]}))
    assert not door._saves_last(type("Lambda", (Trainer,), {"_save_checkpoint": lambda *_: None}))


def test_trainers_that_do_nothing_after_a_save_go_on_in_the_background():
    """GRPO's trainer writes a file into the checkpoint after a save, so it waits."""
    names = [name for name in trl.__all__ if name.endswith("Trainer")]
    found = {name: door._saves_last(getattr(trl, name)) for name in names}
    assert found["SFTTrainer"]
    assert [name for name in found if not found[name]] == ["GRPOTrainer"]


class Asking:
    """Stands for an ``Accelerator``."""


def slow_first():
    """Ask the first process for a value that takes longer than a process may be silent."""
    ranks = fastckpt.distributed.Ranks(timeout=0.5)
    _processes.Crew = lambda _, directory: crew.Crew(ranks, directory)
    return _processes.crew_of(Asking()).first("slow", lambda: time.sleep(1.5) or 7)


def test_the_first_process_may_take_its_time(libraries):
    """Mutant: processes that have not met the first one stop waiting for it."""
    with libraries.group(2, backend="gloo") as group:
        assert group.run(slow_first) == [7, 7]
