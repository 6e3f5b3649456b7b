"""No program begins a new run by accident in the directory of an existing run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fastckpt
from fastckpt import keep
from harness import manifest, points, s3
from harness.branches import CACHE, FORM, save, state
from harness.tiers import kept


def begin(directory, text, kind=fastckpt.CheckpointError, **options):
    """Check that a restore raises an error with ``text``, except with ``fresh=True``."""
    for read_only in (False, True):
        manager = fastckpt.Manager(directory, read_only=read_only, **options)
        with pytest.raises(kind, match=text) as raised:
            manager.restore()
        assert type(raised.value) is kind
        assert manager.restore(fresh=True) is None


def test_nothing_is_a_new_beginning(tmp_path):
    (tmp_path / "run" / "logs-1").mkdir(parents=True)
    (tmp_path / "run" / "events.1").touch()
    fastckpt.save(state(0), tmp_path / "run" / "pretrained")
    for directory in (tmp_path / "none", tmp_path / "run"):
        for remote in (None, tmp_path / "far", f"memory://{tmp_path.name}/nothing"):
            assert fastckpt.Manager(directory, remote=remote).restore() is None
    # A killed first save left its workspace, and a query for the best step wrote the cache.
    (tmp_path / "run" / ".step-00000001.tmp-node-0123456789abcdef-1-2-3-01234567").mkdir()
    fastckpt.Manager(tmp_path / "run", keep=keep.Best(1, "loss")).best()
    assert fastckpt.Manager(tmp_path / "run").restore() is None


def test_another_form_of_names_is_no_new_beginning(tmp_path):
    save(tmp_path, [1000])
    begin(tmp_path, "step-00001000 is a checkpoint whose name does not fit name=", name="step-{step}")


@pytest.mark.parametrize("kept", ["latest", CACHE, "step-00000001.pin"])
def test_a_lost_checkpoint_is_no_new_beginning(tmp_path, kept):
    save(tmp_path, [1], keep=1)
    fastckpt.Manager(tmp_path).pin(1)
    fastckpt.remove(tmp_path / "step-00000001")
    for name in ("latest", CACHE, "step-00000001.pin"):
        if name != kept:
            (tmp_path / name).unlink()
    begin(tmp_path, kept.replace(".", r"\."))


def test_a_disk_that_is_not_mounted_is_no_new_beginning(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    begin(tmp_path / "runs" / "gpt", "symbolic link to .*/disk/runs, which is missing")
    table = tmp_path / "fstab"
    table.write_text(f"# a disk\nLABEL=data {tmp_path}/my\\040disk ext4 defaults 0 2\n")
    with points.replaced(points.MOUNTS, lambda _: table):
        begin(tmp_path / "my disk" / "gpt", "fstab names .*/my disk, where nothing is mounted")
    assert fastckpt.Manager(tmp_path / "other").restore() is None


def test_objects_without_a_manifest_are_no_new_beginning(tmp_path):
    url = f"memory://{tmp_path.name}/lost"
    save(tmp_path / "one", [1000], remote=url)
    s3.objects(f"{url}/step-00001000").remove(["fastckpt.json"])
    begin(tmp_path / "two", "there are objects below step-00001000/, but no manifest", remote=url)
    begin(tmp_path / "two", "there are objects below", remote=url, remote_keep=1)
    s3.objects(url).remove([*s3.objects(url).sizes()])
    save(tmp_path / "one", [2000], remote=url)
    begin(tmp_path / "two", "step-00001000 is a checkpoint|step-00002000 is", remote=url, name="{step}")


@pytest.mark.parametrize("name", ["step-{step:08d}", "ckpt-{step}"])
def test_other_names_in_a_store_hide_no_earlier_run(tmp_path, name):
    """Mutant: only the last names with a number are checked."""
    url = f"memory://{tmp_path.name}/hidden"
    save(tmp_path / "one", [1000], remote=url, name=name)
    store = s3.objects(url)
    if name == FORM:
        store.remove([f"{FORM.format(step=1000)}/fastckpt.json"])
    store.remove([CACHE, "latest"])
    for number in range(40):
        store.write(f"tensorboard-{number:03d}/events", [b"x"], 1, None)
    words = "no manifest" if name == FORM else "ckpt-1000 is a checkpoint whose name does not fit name="
    begin(tmp_path / "two", words, remote=url)


def test_a_part_of_a_copy_at_a_remote_directory_is_no_new_beginning(tmp_path):
    (tmp_path / "far" / ".step-00000007.copy-0123456789abcdef").mkdir(parents=True)
    begin(tmp_path / "run", "step-00000007.copy-0123456789abcdef is a part of a checkpoint", remote=tmp_path / "far")


def test_checkpoints_of_another_library_are_not_damaged_ones(tmp_path):
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    for directory, options in ((tmp_path, {}), (tmp_path, {"name": "other-{step}"})):
        if not options:
            with pytest.warns(RuntimeWarning, match="fastckpt import"):
                begin(
                    directory, "torch.distributed.checkpoint; 'fastckpt import", fastckpt.exceptions.NotACheckpointError
                )
        else:
            begin(directory, "torch.distributed.checkpoint", fastckpt.exceptions.NotACheckpointError, **options)


def test_who_asks_for_a_report_gets_that_of_the_result(tmp_path):
    save(tmp_path, [1])
    reports = []
    found = fastckpt.Manager(tmp_path).restore(io=fastckpt.IO("buffered", on_report=reports.append))
    assert reports == [found.report]
    assert found.report.engine == "buffered"
    with pytest.raises(TypeError, match=r"'on_report': it is an option of io=fastckpt\.IO\("):
        fastckpt.Manager(tmp_path).restore(on_report=print)


def test_an_error_in_the_function_that_gets_the_report_is_no_damage(tmp_path):
    save(tmp_path, [1, 2])

    def fail(_):
        raise FileNotFoundError("no directory for reports")

    with pytest.raises(FileNotFoundError, match="for reports"):
        fastckpt.Manager(tmp_path).restore(io=fastckpt.IO(on_report=fail))
    assert fastckpt.Manager(tmp_path).restore().step == 2


def test_a_kind_of_value_that_is_not_known_is_of_a_later_release_and_no_damage(tmp_path):
    """After a library is rolled back, a run must not pass over its newest checkpoints as damaged."""
    manager = fastckpt.Manager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"step": step})
    manager.wait()
    newest = Path(manager.path(2))
    body = manifest.body_of(newest)
    body["structure"] = [["from-tomorrow", 1] if token == 2 else token for token in body["structure"]]
    manifest.forge(newest, body)
    for way in (fastckpt.load, lambda _path: fastckpt.Manager(tmp_path).restore()):
        with pytest.raises(fastckpt.exceptions.FormatVersionError, match=r"'from-tomorrow'.*upgrade fastckpt-io"):
            way(newest)


def test_what_is_left_behind_stays_where_the_branch_has_lost_all(tmp_path):
    first, aside = tmp_path / "run" / FORM.format(step=0), tmp_path / "aside"
    save(tmp_path / "run", [0])
    shutil.copytree(first, aside)
    with fastckpt.Manager(tmp_path / "run") as writer:
        writer.restore()
        writer.save(0, state(0, "b"), force=True)
    shutil.rmtree(first)
    aside.rename(first)
    manager = fastckpt.Manager(tmp_path / "run", keep=1, read_only=True)
    assert (manager.latest(), kept(manager)) == (None, {0: ["left behind, until the run has passed it"]})
    begin(tmp_path / "run", r"every checkpoint here is on a branch that it left; .* call restore\(step=0\)")
    assert manager.restore(step=0).state["branch"] == "a"
