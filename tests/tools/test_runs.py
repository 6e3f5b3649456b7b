"""``fastckpt ls`` of a run and ``fastckpt prune``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import keep
from harness import cli


@pytest.fixture
def run(tmp_path):
    """Six checkpoints of a run; a manager that keeps fewer has not removed any yet."""
    with fastckpt.Manager(tmp_path) as manager:
        for step in range(1, 7):
            manager.save(step, {"a": np.full(1000, step)}, {"loss": abs(step - 2) + 0.5})
            manager.wait()
        manager.pin(4)
    return tmp_path


def command(capsys, *arguments):
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_ls_of_a_run_says_what_is_there_and_why_it_stays(run, capsys):
    status, document = command(capsys, "ls", run, "--keep", "last=2", "--keep", "best=1:loss:min")
    assert status == 0
    why = {one["step"]: one["kept"] for one in document["checkpoints"]}
    assert why == {1: [], 2: ["best=1:loss:min"], 3: [], 4: ["pinned"], 5: ["last=2"], 6: ["last=2"]}
    first = document["checkpoints"][0]
    assert first["metrics"] == {"loss": 1.5}
    assert first["bytes"] == sum(file.stat().st_size for file in (run / "step-00000001").iterdir())
    assert first["gigabytes_per_second"] > 0
    assert document["bytes"] == sum(one["bytes"] for one in document["checkpoints"])
    assert cli.main(["ls", str(run), "--keep", "last=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "created", "size", "shared", "GB/s", "metrics", "changed", "kept", "for"]
    assert lines[1].split()[-3:] == ["loss", "1.5", "nothing"]
    assert lines[4].endswith("pinned")
    assert lines[-1].startswith("6 checkpoints, ")


def test_bytes_that_several_checkpoints_share_count_once(run, capsys):
    one, other = run / "step-00000001" / "model.safetensors", run / "step-00000002" / "model.safetensors"
    other.unlink()
    os.link(one, other)
    _, document = command(capsys, "ls", run)
    first, second = document["checkpoints"][:2]
    assert (first["shared_bytes"], second["shared_bytes"]) == (0, one.stat().st_size)
    assert document["bytes"] == sum(each["bytes"] for each in document["checkpoints"]) - one.stat().st_size


def test_a_damaged_one_is_named_and_counts_for_nothing(run, capsys):
    (run / "step-00000006" / "fastckpt.json").write_bytes(b"{")
    _, document = command(capsys, "ls", run, "--keep", "last=1")
    assert [one["step"] for one in document["checkpoints"] if one["kept"]] == [4, 5]
    assert "manifest" in document["checkpoints"][-1]["damage"]


def test_a_metric_that_is_no_number_has_a_form_in_json(run, capsys):
    with fastckpt.Manager(run) as manager:
        manager.save(7, {"a": 7}, {"loss": float("nan"), "most": float("inf")})
    _, document = command(capsys, "ls", run)
    assert document["checkpoints"][-1]["metrics"] == {"loss": "nan", "most": "inf"}
    assert cli.main(["ls", str(run)]) == 0
    assert "loss nan, most inf" in capsys.readouterr().out


def test_a_dry_run_removes_nothing(run, capsys):
    status, document = command(capsys, "prune", run, "--keep", "last=1")
    assert (status, document["removed"], document["dry_run"]) == (0, [1, 2, 3, 5], True)
    assert fastckpt.Manager(run).steps() == [1, 2, 3, 4, 5, 6]
    assert cli.main(["prune", str(run), "--keep", "last=1"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "4 checkpoints would be removed, 2 stay: add --yes to remove what would go"
    )


def test_prune_removes_what_no_policy_keeps(run, capsys):
    status, document = command(capsys, "prune", run, "--yes", "--keep", "every=3")
    assert (status, document["removed"]) == (0, [1, 2, 5])
    assert document["kept"] == {"3": ["every=3"], "4": ["pinned"], "6": ["every=3"]}
    assert fastckpt.Manager(run).steps() == [3, 4, 6]


def test_prune_takes_the_policies_of_the_runs_manager(run, capsys):
    with fastckpt.Manager(run, keep=[keep.Last(5), keep.Best(1, "loss")]) as manager:
        manager.save(7, {"a": 7}, {"loss": 9.0})
    _, document = command(capsys, "prune", run, "--yes")
    assert (document["keep"], document["removed"]) == (["last=5", "best=1:loss:min"], [])
    assert manager.steps() == [2, 3, 4, 5, 6, 7]


def test_prune_without_policies_is_an_error(run, capsys):
    (run / ".fastckpt-run.json").unlink()
    status, document = command(capsys, "prune", run, "--yes")
    assert status == 2
    assert "no policy is known" in document["error"]
    status, document = command(capsys, "prune", run, "--yes", "--keep", "most")
    assert status == 2
    assert "'most' is not a policy" in document["error"]


def test_prune_removes_nothing_where_the_newest_is_damaged(run, capsys):
    file = run / "step-00000006" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0" if file.read_bytes()[-1] else file.read_bytes()[:-1] + b"\1")
    status, document = command(capsys, "prune", run, "--yes", "--keep", "last=1")
    assert status == 1
    assert "step-00000006, is damaged" in document["error"]
    assert fastckpt.Manager(run).steps() == [1, 2, 3, 4, 5, 6]


def test_prune_verifies_the_newest_of_the_branch_that_goes_on(run, capsys):
    """Mutant: the highest step is verified, which is on an abandoned branch."""
    with fastckpt.Manager(run) as manager:
        manager.restore(step=2)
        manager.save(5, {"a": np.full(1000, 55)}, force=True)
    file = run / "step-00000006" / "model.safetensors"
    file.write_bytes(b"damaged")
    _, document = command(capsys, "prune", run, "--yes", "--keep", "last=1")
    assert (document["removed"], fastckpt.Manager(run).steps()) == ([1, 2, 3], [4, 5, 6])
    with fastckpt.Manager(run) as manager:
        manager.save(7, {"a": 7})
        manager.restore(step=4)
        manager.unpin(4)
        manager.save(5, {"a": np.full(1000, 5)}, force=True)
        manager.wait()
    file = run / "step-00000005" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    status, document = command(capsys, "prune", run, "--yes", "--keep", "last=1")
    assert status == 1
    assert "step-00000005, is damaged" in document["error"]


def test_one_failed_removal_does_not_stop_the_rest(run, capsys):
    (run / "step-00000001" / "notes").mkdir()
    status, document = command(capsys, "prune", run, "--yes", "--keep", "last=1", "--force")
    assert (status, document["removed"], document["foreign"], len(document["failures"])) == (1, [2, 3, 5], {}, 1)


def test_a_checkpoint_with_files_of_others_stays_unless_forced(run, capsys):
    (run / "step-00000001" / "notes.txt").write_text("mine")
    assert cli.main(["prune", str(run), "--yes", "--keep", "last=1"]) == 1
    told = "step-00000001: stays: it holds notes.txt, which is not part of it: move it, or give --force"
    assert told in capsys.readouterr().out
    status, document = command(capsys, "prune", run, "--yes", "--keep", "last=1", "--force")
    assert (status, document["removed"], document["foreign"]) == (0, [1], {})
    assert not (run / "step-00000001").exists()


def test_the_share_that_changed_is_a_column(tmp_path, capsys):
    with fastckpt.Manager(tmp_path, stale="ignore") as manager:
        for step, weight in enumerate((1, 2, 2), 1):
            state = {"w": np.full(10, weight, np.float32), "frozen": np.zeros(30, np.float32)}
            manager.save(step, {"model": state, "optim": {"m": np.full(10, step, np.float32)}})
            manager.wait()
    _, document = command(capsys, "ls", tmp_path)
    shares = [{}, {"model": 0.25, "optimizer": 1.0}, {"model": 0.0, "optimizer": 1.0}]
    assert [one["changed"] for one in document["checkpoints"]] == shares
    assert cli.main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model 25 %, optimizer 100 %" in lines[2]
    assert "model 0 %, optimizer 100 %" in lines[3]


def test_the_shares_of_a_run_in_a_store_are_those_that_later_steps_know(tmp_path, capsys):
    url = f"memory://{tmp_path.name}/run"
    with fastckpt.Manager(tmp_path, remote=url, stale="ignore") as manager:
        for step, weight in enumerate((1, 2, 2, 3), 1):
            manager.save(step, {"model": np.full(10, weight, np.float32)}, {"loss": 0.5})
            manager.wait()
    _, document = command(capsys, "ls", url)
    assert [one["changed"] for one in document["checkpoints"]] == [{}, {"model": 1.0}, {"model": 0.0}, {}]
    assert document["checkpoints"][0]["metrics"] == {"loss": 0.5}


def test_a_checkpoint_is_no_run(tmp_path, capsys):
    url = f"memory://{tmp_path.name}/run"
    with fastckpt.Manager(tmp_path, remote=url) as manager:
        manager.save(1, {"a": 1})
    for arguments in (
        ["ls", manager.path(1), "--keep", "last=1"],
        ["prune", manager.path(1)],
        ["ls", f"{url}/step-00000001", "--name", "step-{step}"],
    ):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert not out
        assert f"{arguments[0]} {arguments[1]}: it is a checkpoint itself: give the directory above it" in err


def test_names_without_zeros_are_found_in_the_order_of_their_steps(tmp_path, capsys):
    for name in ("step-1000", "step-900", "step-10000", "final", "epoch-2"):
        fastckpt.save({"a": 1}, tmp_path / name)
    _, document = command(capsys, "ls", tmp_path)
    assert "others" not in document  # no manager has saved here
    _, document = command(capsys, "ls", tmp_path, "--keep", "last=9")
    assert [one["step"] for one in document["checkpoints"]] == [900, 1000, 10000]
    assert document["others"] == ["epoch-2", "final"]
    assert cli.main(["ls", str(tmp_path), "--keep", "last=9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "under other names: epoch-2, final"
    assert cli.main(["ls", str(tmp_path), "--name", "step-{step:08d}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"there is no checkpoint in {tmp_path} with the name of a step"
    assert "step-1000" in lines[1]
    status, document = command(capsys, "prune", tmp_path, "--keep", "last=2", "--yes")
    assert status == 2
    assert "give --name, such as step-{step}, which leaves epoch-2 alone" in document["error"]
    _, document = command(capsys, "prune", tmp_path, "--keep", "last=2", "--yes", "--name", "step-{step}")
    assert document["removed"] == [900]
    assert [one.name for one in fastckpt.list(tmp_path)] == ["step-1000", "step-10000", "final", "epoch-2"]


def test_other_names_and_nothing(tmp_path, capsys):
    assert cli.main(["ls", str(tmp_path), "--keep", "last=1"]) == 0
    assert capsys.readouterr().out == f"there is no checkpoint in {tmp_path}\n"
    assert cli.main(["ls", str(tmp_path / "nowhere"), "--keep", "last=1"]) == 2
    assert "cannot open" in capsys.readouterr().err
    assert cli.main(["ls", str(tmp_path), "w", "--keep", "last=1"]) == 2
    assert "PATTERN is for one checkpoint" in capsys.readouterr().err
    fastckpt.save({"a": 1}, tmp_path / "gpt.5")
    _, document = command(capsys, "ls", tmp_path, "--name", "gpt.{step}")
    assert [one["step"] for one in document["checkpoints"]] == [5]
    assert Path(document["path"]) == tmp_path


def test_prune_leaves_what_others_put_there_and_takes_what_files_gave(tmp_path, capsys):
    with fastckpt.Manager(tmp_path, save_options={"files": {"config.json": "{}"}}) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": step})
    (tmp_path / "step-00000001" / "NOTES.txt").write_text("mine")
    status, document = command(capsys, "prune", tmp_path, "--yes", "--keep", "last=1")
    assert (status, document["removed"]) == (1, [2])
    assert document["foreign"] == {"1": "NOTES.txt"}
    assert (tmp_path / "step-00000001" / "NOTES.txt").read_text() == "mine"
