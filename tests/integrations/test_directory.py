"""What all doors need of a directory of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastckpt
from fastckpt.integrations import _directory


@pytest.fixture
def steps(tmp_path):
    """Checkpoints 1 to 5; the fourth is another writer's."""
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


def test_the_newest_comes_first(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    found = _directory.newest_first(tmp_path.glob("checkpoint-*/state.json"))
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
    (tmp_path / ".checkpoint-7.aside-1").mkdir()  # by a process that was killed
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
