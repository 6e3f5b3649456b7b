"""``fastckpt.list`` and ``fastckpt.remove``. The core's tests cover the protocol."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest

import fastckpt


@pytest.fixture
def run(tmp_path):
    """A directory with three checkpoints and other entries."""
    for step in (10, 2, 1):
        fastckpt.save({"a": np.full(1000, step)}, tmp_path / f"step-{step}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "latest").symlink_to("step-10")
    return tmp_path


def test_checkpoints_are_listed_with_what_their_manifests_say(run):
    found = fastckpt.list(run)
    assert [one.name for one in found] == ["step-1", "step-2", "step-10"]
    for one in found:
        assert isinstance(one, fastckpt.types.ListedCheckpoint)
        assert one.path == str(run / one.name)
        assert one.bytes == sum(file.stat().st_size for file in (run / one.name).iterdir())
        assert abs(one.created - time.time()) < 1000
        assert (one.aside, one.damage) == (False, None)
        assert fastckpt.load(one.path)["a"].shape == (1000,)
    newest = max(found, key=lambda one: one.created)
    assert newest.name == "step-1"
    assert repr(newest).startswith('ListedCheckpoint(name="step-1", created=')


def test_a_damaged_checkpoint_is_listed_as_such(run):
    (run / "step-1" / "model.safetensors").unlink()
    (run / "step-2" / "fastckpt.json").write_bytes(b"{")
    damage = {one.name: one.damage for one in fastckpt.list(run)}
    assert "`model.safetensors` cannot be found" in damage["step-1"]
    assert "does not begin as a manifest" in damage["step-2"]
    assert damage["step-10"] is None


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        fastckpt.list(tmp_path / "nowhere")
    assert caught.value.filename == str(tmp_path / "nowhere")


def test_remove(run):
    fastckpt.remove(run / "step-1")
    assert sorted(entry.name for entry in run.iterdir()) == ["latest", "logs", "step-10", "step-2"]
    with pytest.raises(FileNotFoundError):
        fastckpt.remove(run / "step-1")


def test_what_files_put_there_goes_with_it(run):
    path, outside = run / "step-1", run / "logs" / "mine"
    outside.write_text("mine")
    (path / "config.json").write_text("{}")
    (path / "link.json").symlink_to(outside)
    names = ["config.json", "link.json", "../logs/mine"]
    with pytest.raises(OSError, match=r"`link\.json`, which is not part of the checkpoint") as caught:
        fastckpt.remove(path, files=names)
    assert caught.value.errno == errno.ENOTEMPTY
    assert (path / "config.json").exists()
    (path / "link.json").unlink()
    fastckpt.remove(path, files=names)
    assert not path.exists()
    assert outside.read_text() == "mine"


def test_what_is_no_checkpoint_or_holds_other_files_stays(run):
    (run / "step-1" / "config.json").write_text("{}")
    for name, why in {
        "step-1": r"`config\.json`.*force=True",
        "logs": "empty directory",
        "latest": "symbolic link",
    }.items():
        with pytest.raises(OSError, match=why) as caught:
            fastckpt.remove(run / name)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTEMPTY, str(run / name))
        assert (run / name).exists()
    fastckpt.remove(run / "step-1", force=True)
    assert not (run / "step-1").exists()


def test_urls_are_no_paths():
    with pytest.raises(ValueError, match="URL"):
        fastckpt.clean("s3://bucket/step-1")


def test_a_list_goes_by_the_step_or_by_time(tmp_path):
    for name in ("run2-step-20", "run2-step-3", "run2-step-100"):
        fastckpt.save({}, tmp_path / "run" / name)
    assert [one.name for one in fastckpt.list(tmp_path / "run")] == ["run2-step-3", "run2-step-20", "run2-step-100"]
    fastckpt.save({}, tmp_path / "run" / "final")
    (tmp_path / "run" / "run2-step-100" / "fastckpt.json").write_bytes(b"")
    names = ["run2-step-100", "run2-step-20", "run2-step-3", "final"]
    assert [one.name for one in fastckpt.list(tmp_path / "run")] == names
    # The numbers in dates are not steps.
    dates = ["run-2023-12-31", "run-2024-06-01", "run-2024-05-30"]
    for name in dates:
        fastckpt.save({}, tmp_path / "dates" / name)
    assert [one.name for one in fastckpt.list(tmp_path / "dates")] == dates
    versions = ["step-2000-v1", "step-1000-v2"]
    for name in versions:
        fastckpt.save({}, tmp_path / "versions" / name)
    assert [one.name for one in fastckpt.list(tmp_path / "versions")] == versions


def test_remove_waits_for_a_save_in_flight(tmp_path):
    state = {"a": np.zeros(1 << 20)}
    path = tmp_path / "c"
    fastckpt.save(state, path)
    # The save is so slow that it is in flight when remove is called, whichever thread runs first.
    pending = fastckpt.save_async(state, path, io=fastckpt.IO(bandwidth_limit=16 << 20))
    caller = threading.Thread(target=fastckpt.remove, args=(path,))
    caller.start()
    caller.join()
    assert pending.done()
    assert pending.result(timeout=0) is not None
    assert fastckpt.list(tmp_path) == []
    assert not list(tmp_path.iterdir())
