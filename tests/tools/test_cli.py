"""The command line, run as a user runs it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastckpt
from harness import cli, needs, programs, zygote

try:
    import safetensors.torch as safetensors_torch
    import torch
except ImportError as error:
    needs.missing(str(error))


def run(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Do what :func:`run` does, but in this process, which is faster."""
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    status, out, err = call(capsys, *arguments, "--json")
    assert err == ""
    return status, json.loads(out)


def equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


@pytest.fixture
def model() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(100, 32, dtype=torch.bfloat16),
        "layer.0.weight": torch.randn(32, 64),
        "layer.0.bias": torch.randn(64),
        "layer.1.weight": torch.randn(64, 8).half(),
        "steps": torch.tensor(7),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, model: dict[str, Any]) -> Path:
    path = tmp_path / "step-7"
    fastckpt.save(model, path, metadata={"step": 7, "loss": 0.5, "tags": ("a", "b"), "bad": float("nan")})
    return path


def damage(checkpoint: Path, offset_from_end: int = 1) -> None:
    shard = checkpoint / "model.safetensors"
    with shard.open("r+b") as file:
        file.seek(-offset_from_end, os.SEEK_END)
        byte = file.read(1)
        file.seek(-offset_from_end, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_version_of_the_module_and_of_the_command() -> None:
    for command in ([sys.executable, "-m", "fastckpt"], [str(Path(sys.executable).with_name("fastckpt"))]):
        if not Path(command[0]).exists():
            needs.missing(f"the console script {command[0]} (pip install)")
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"fastckpt {fastckpt.__version__}\n")


def test_without_a_command_or_with_a_wrong_one_the_status_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["frobnicate"], ["info"], ["ls", "a", "b", "c"], ["info", "x", "--wrong"]):
        status, out, err = call(capsys, *arguments)
        assert (status, out) == (2, "")
        assert "--help" in err


def test_usage_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = call_json(capsys, "info")
    assert status == 2
    assert "PATH" in document["error"]


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_a_missing_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    missing = tmp_path / "missing"
    status, out, err = call(capsys, command, missing)
    assert (status, out) == (2, "")
    assert str(missing) in err
    assert "Traceback" not in err
    status, document = call_json(capsys, command, missing)
    assert status == 2
    assert str(missing) in document["error"]
    assert document["type"] == "FileNotFoundError"


@pytest.mark.parametrize("command", ["info", "ls", "verify"])
def test_what_is_no_checkpoint_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "file", tmp_path / "directory"):
        status, out, err = call(capsys, command, path)
        assert (status, out) == (2, "")
        assert str(path) in err
    # Shards without a manifest may belong to any program.
    (tmp_path / "directory" / "model.safetensors").touch()
    status, document = call_json(capsys, command, tmp_path / "directory")
    assert (status, document["type"]) == (2, "NotACheckpointError")
    (tmp_path / "directory" / "fastckpt.json").touch()
    assert call(capsys, command, tmp_path / "directory")[0] == 1


@pytest.mark.parametrize("error", [KeyError("k"), ValueError("v"), TypeError("t"), ImportError("i"), OSError("o")])
def test_no_error_is_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(fastckpt, "verify", fail)
    assert call(capsys, "verify", checkpoint) == (2, "", f"fastckpt: {error.args[0]}\n")
    assert call_json(capsys, "verify", checkpoint) == (
        2,
        {"schema": "fastckpt/error/1", "error": error.args[0], "type": type(error).__name__},
    )


def test_output_that_cannot_be_written_is_an_error(checkpoint: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fastckpt", "ls", str(checkpoint)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fastckpt: cannot write to standard output: No space left on device")
    assert "Traceback" not in done.stderr


def test_one_remedy_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cause, remedies in (("No such file or directory", 1), ("No such file or directory: is it mounted?", 0)):
        failure = FileNotFoundError(2, f"cannot open checkpoint `{tmp_path}`: {cause}", str(tmp_path))
        monkeypatch.setattr(fastckpt, "verify", lambda *_, failure=failure, **__: (_ for _ in ()).throw(failure))
        assert call(capsys, "verify", tmp_path)[2].count("check the path") == remedies


def test_export_into_a_place_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "file").touch()
    for parent, kind in (("missing", "FileNotFoundError"), ("file", "NotADirectoryError")):
        status, document = call_json(capsys, "export", checkpoint, tmp_path / parent / "m.safetensors")
        assert (status, document["type"]) == (2, kind)
        assert str(tmp_path / parent) in document["error"]


def test_info_ls_and_verify_work_without_torch(checkpoint: Path) -> None:
    # An entry of None in sys.modules makes the import fail, as without an installed torch.
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None\n"
        "from harness.cli import main\n"
        "print([main([command, sys.argv[1]]) for command in ('info', 'ls', 'verify')])\n"
        "print(main(['export', sys.argv[1], sys.argv[1] + '.safetensors']))"
    )
    command, environment = [sys.executable, "-c", program, str(checkpoint)], zygote.environment()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "[0, 0, 0]" in done.stdout
    assert done.stdout.endswith("\n2\n")
    assert "pip install torch" in done.stderr


def test_a_reader_that_closes_early_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "many"
    fastckpt.save({f"tensor-{index}": np.zeros(1) for index in range(5000)}, path)
    command = f"'{sys.executable}' -m fastckpt ls '{path}' | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.split() == ["name", "dtype", "shape", "bytes", "shard"]


# -- info and ls -------------------------------------------------------------------------------------------------------


def test_info_is_one_screen(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    status, out, err = call(capsys, "info", checkpoint)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) <= 40
    for text in (str(checkpoint), "5 tensors", "1 shard", "version 1", "GB/s", "engine", "step", "model.safetensors"):
        assert text in out


def test_info_as_json(capsys: pytest.CaptureFixture[str], checkpoint: Path, model: dict[str, Any]) -> None:
    status, document = call_json(capsys, "info", checkpoint)
    assert status == 0
    assert document["tensors"] == 5
    assert document["bytes"] == sum(tensor.nbytes for tensor in model.values())
    assert document["metadata"] == {"step": 7, "loss": 0.5, "tags": ["a", "b"], "bad": "nan"}
    assert sum(entry["tensors"] for entry in document["dtypes"].values()) == 5
    assert len(document["dtypes"]) == 4
    assert document["shards"] == [
        {"file": "model.safetensors", "bytes": (checkpoint / "model.safetensors").stat().st_size}
    ]
    assert document["format_version"] == 1
    assert document["engine"] in ("uring", "threads", "buffered")
    assert abs(document["created"] - checkpoint.stat().st_mtime) < 60


def test_info_of_much_stays_short(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = {f"t{index}": np.zeros(2000, np.uint8) for index in range(40)}
    fastckpt.save(
        state,
        tmp_path / "c",
        files=fastckpt.Files(shard_size=2000),
        metadata={f"key {index}": "x" * 1000 for index in range(100)},
    )
    status, out, _ = call(capsys, "info", tmp_path / "c")
    assert status == 0
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 140
    assert "and 88 more" in out


def test_info_works_where_the_metadata_cannot_be_read(tmp_path: Path) -> None:
    program = (
        "import sys, fastckpt\n"
        "class Own: pass\n"
        "fastckpt.register_type(Own, lambda own: 1, lambda _: Own(), name='own')\n"
        "fastckpt.save({}, sys.argv[1], metadata={'own': Own()})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=60)
    done = run("info", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert "own" in done.stdout


def test_info_of_an_empty_state(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fastckpt.save({}, tmp_path / "c")
    status, out, _ = call(capsys, "info", tmp_path / "c")
    assert status == 0
    assert "0 tensors" in out


def test_ls_has_aligned_columns_and_a_total(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    status, out, err = call(capsys, "ls", checkpoint)
    assert (status, err) == (0, "")
    head, *rows, total = out.splitlines()
    assert head.split() == ["name", "dtype", "shape", "bytes", "shard"]
    assert len(rows) == 5
    assert all(row.index("model.safetensors") == head.index("shard") for row in rows)
    assert rows[1].split() == ["layer.0.weight", rows[1].split()[1], "[32,", "64]", "8192", "model.safetensors"]
    assert total.startswith("5 tensors, 15880 bytes (15.88 kB)")


def test_ls_with_a_pattern(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    status, document = call_json(capsys, "ls", checkpoint, "layer.*.weight")
    assert status == 0
    assert [(tensor["name"], tensor["shape"]) for tensor in document["tensors"]] == [
        ("layer.0.weight", [32, 64]),
        ("layer.1.weight", [64, 8]),
    ]
    assert document["bytes"] == 8192 + 1024
    status, out, err = call(capsys, "ls", checkpoint, "layer.0.wieght")
    assert (status, out) == (2, "")
    assert "'layer.0.wieght' matches no tensor; similar: 'layer.0.weight'" in err


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_a_whole_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    status, out, err = call(capsys, "verify", checkpoint)
    assert (status, err) == (0, "")
    assert "no damage" in out
    status, document = call_json(capsys, "verify", checkpoint)
    assert status == 0
    assert document["ok"] is True
    assert document["damage"] == []
    assert document["gigabytes_per_second"] > 0
    assert isinstance(document["phases"], dict)


def test_verify_lists_damage_and_exits_with_1(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    damage(checkpoint)
    status, out, _ = call(capsys, "verify", checkpoint)
    assert status == 1
    assert out.startswith("model.safetensors: bytes ")
    status, document = call_json(capsys, "verify", checkpoint)
    assert status == 1
    assert document["ok"] is False
    (found,) = document["damage"]
    assert found["file"] == "model.safetensors"
    assert found["tensor"] in ("embed.weight", "layer.0.bias", "layer.1.weight", "steps")
    assert found["reason"]


def test_verify_of_a_damaged_manifest_exits_with_1(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    manifest = checkpoint / "fastckpt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"embed.weight", b"embed.weighs", 1))
    status, out, err = call(capsys, "verify", checkpoint)
    assert status == 1
    assert "fastckpt.json" in out + err


def test_verify_of_a_newer_version_is_an_error_not_damage(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    manifest = checkpoint / "fastckpt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"fastckpt":1', b'"fastckpt":2', 1))
    status, document = call_json(capsys, "verify", checkpoint)
    assert status == 2
    assert document["type"] == "FormatVersionError"


def test_verify_shows_progress_on_a_terminal_only(checkpoint: Path) -> None:
    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "fastckpt", "verify", str(checkpoint)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=False)
    os.close(terminal)
    shown = os.read(main, 10_000)
    os.close(main)
    assert done.returncode == 0
    assert b"verify" in shown
    assert run("verify", checkpoint).stderr == ""


def test_verify_all_of_a_directory(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    status, out, err = call(capsys, "verify", "--all", steps)
    assert (status, err) == (0, "")
    first, second, last = out.splitlines()
    assert first.startswith("step-900: ")
    assert second.startswith("step-1000: ")
    assert last == "2 checkpoints, 0 damaged"
    damage(steps / "step-900")
    fastckpt.save({"w": np.zeros(1)}, steps / "step-1100")
    (steps / "step-1100" / "fastckpt.json").write_bytes(b"{")
    status, document = call_json(capsys, "verify", steps, "--all")
    assert (status, document["ok"]) == (1, False)
    assert [Path(one["path"]).name for one in document["checkpoints"]] == ["step-900", "step-1000", "step-1100"]
    assert [one["ok"] for one in document["checkpoints"]] == [False, True, False]
    assert document["checkpoints"][0]["damage"][0]["file"] == "model.safetensors"
    assert "step-1100" in document["checkpoints"][2]["error"]
    assert call(capsys, "verify", "--all", steps)[1].splitlines()[3:] == ["3 checkpoints, 2 damaged"]
    # A checkpoint of a later version does not count as damaged.
    shutil.rmtree(steps / "step-1100")
    fastckpt.save({"w": np.zeros(1)}, steps / "step-900", overwrite=True)
    manifest = steps / "step-900" / "fastckpt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"fastckpt":1', b'"fastckpt":2', 1))
    assert call(capsys, "verify", "--all", steps)[0] == 2
    (steps / "empty").mkdir()
    assert "no checkpoint is in it" in call(capsys, "verify", "--all", steps / "empty")[2]


# -- output ------------------------------------------------------------------------------------------------------------


def test_json_and_quiet_stand_before_or_after_the_command(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    after = call(capsys, "ls", checkpoint, "--json")
    assert call(capsys, "--json", "ls", checkpoint) == after
    assert next(iter(json.loads(after[1]))) == "schema"
    for arguments in (
        ["--quiet", "ls", checkpoint],
        ["ls", checkpoint, "--quiet"],
        ["--quiet", "--json", "info", checkpoint],
    ):
        assert call(capsys, *arguments) == (0, "", "")
    damage(checkpoint)
    assert call(capsys, "verify", "--quiet", checkpoint) == (1, "", "")
    status, out, err = call(capsys, "--quiet", "--json", "verify", tmp_path / "missing")
    assert (status, out) == (2, "")
    assert str(tmp_path / "missing") in err
    assert json.loads(call(capsys, "--json", "frobnicate")[1])["schema"] == "fastckpt/error/1"


def test_quiet_shows_no_progress(checkpoint: Path, tmp_path: Path) -> None:
    main, terminal = os.openpty()
    for command in (["verify", checkpoint], ["copy", checkpoint, tmp_path / "copy"]):
        arguments = [sys.executable, "-m", "fastckpt", "--quiet", *map(str, command)]
        assert subprocess.run(arguments, stdout=terminal, stderr=terminal, timeout=60, check=False).returncode == 0
    os.close(terminal)
    os.set_blocking(main, False)
    with pytest.raises((BlockingIOError, OSError)):
        os.read(main, 1)
    os.close(main)


def test_every_document_has_its_schema_first(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    commands = {
        "info": [checkpoint],
        "ls": [tmp_path],
        "verify": [checkpoint],
        "copy": [checkpoint, tmp_path / "copy"],
        "export": [checkpoint, tmp_path / "m.safetensors"],
        "import": [tmp_path / "m.safetensors", tmp_path / "back"],
        "diff": [checkpoint, tmp_path / "copy"],
        "prune": [tmp_path, "--keep", "last=1", "--name", "step-{step}"],
        "clean": [tmp_path],
        "pin": [checkpoint],
        "rm": [tmp_path / "copy"],
        "plan": ["--params", "1B", "--gpus", "8"],
        "doctor": [tmp_path, "--no-probe"],
    }
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8").splitlines()
    for name, arguments in commands.items():
        document = call_json(capsys, name, *arguments)[1]
        assert next(iter(document.items())) == ("schema", f"fastckpt/{name}/1")
        (described,) = (
            row for row in page if f"`fastckpt/{name}/1`" in row and not re.search("` (with|of a (run|ch))", row)
        )
        if name != "plan":
            assert [key for key in document if key != "schema" and f"`{key}`" not in described] == []


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["copy", "CHECKPOINT", "x", "--bandwidth-limit", "fast"], "copy: --bandwidth-limit must"),
        (["clean", ".", "--older-than", "long"], "--older-than"),
        (["rm", "CHECKPOINT"], "give --force"),
        (["copy", "CHECKPOINT", "other"], "no --overwrite"),
        (["import", "m.safetensors", "other", "--overwrite"], "m.safetensors"),
        (["export", "CHECKPOINT", "x", "--format", "hf", "--files", "missing"], "--files: cannot open"),
        (["ls", ".", "--name", "x"], "--name must be"),
        (["plan", "--params", "1B"], "--gpus, or --tp, --pp and --dp"),
        (["plan", "--params", "1B", "--size", "1GB", "--gpus", "8"], "--params and --size"),
        (["plan", "--gpus", "8", "--params", "1B", "--tier", "x"], "--tier must be one of"),
        (["plan", "--gpus", "8", "--params", "1B", "--interval", "x"], "plan: --interval 'x'"),
        (["plan", "--gpus", "8", "--params", "1B", "--target-seconds", "0"], "--target-seconds must be"),
        (["plan", "--gpus", "8", "--params", "1B", "--read", "1GB/s"], "give --write or --node-write beside --read"),
        (["plan", "--gpus", "0", "--params", "1B"], "--gpus must be at least 1"),
        (["plan", "--gpus", "8", "--params", "1B", "--expert-params", "2B"], "--expert-params of at most --params"),
        (["plan", "--simulate", "--cost", "50s", "--gpus", "8", "--from", "b.json"], "--cost and --from cannot be"),
    ],
)
def test_messages_name_options(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    arguments: list[str],
    flag: str,
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    fastckpt.save({"w": np.zeros(1)}, "other")
    (checkpoint / "notes.txt").write_text("mine")
    status, _, err = call(capsys, *(str(checkpoint) if one == "CHECKPOINT" else one for one in arguments))
    assert status == 2
    assert flag in err


@pytest.mark.parametrize("command", ["rm", "ls", "info", "verify", "clean", "prune", "bench", "doctor"])
def test_an_empty_path_is_not_the_current_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path, command: str
) -> None:
    """An unset shell variable gives an empty path, as in ``rm "$UNSET"``."""
    monkeypatch.chdir(checkpoint)
    status, out, err = call(capsys, command, "")
    assert (status, out) == (2, "")
    assert "it is empty" in err
    assert fastckpt.verify(checkpoint).ok


def test_paths_and_names_in_messages_stay_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"overwrite=True": torch.ones(2).to_sparse()}
    fastckpt.save(state, "p overwrite=True")
    assert "p overwrite=True: ['overwrite=True'] is" in call(capsys, "export", "p overwrite=True", "q.safetensors")[2]
    assert "/a: name must" in call(capsys, "ls", "a: name must")[2]


def test_json_and_quiet_stand_between_arguments(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    status, document = 0, json.loads(call(capsys, "ls", checkpoint, "--json", "*")[1])
    assert len(document["tensors"]) == len(fastckpt.open(checkpoint))
    assert call(capsys, "ls", checkpoint, "--quiet", "*") == (status, "", "")
    assert call(capsys, "ls", "--", "--json")[1] == ""


@pytest.mark.parametrize(("closed", "path", "status"), [(">&-", ".", 0), ("2>&-", "nothing", 2), (">&-", "nothing", 2)])
def test_closed_streams_are_no_error(checkpoint: Path, closed: str, path: str, status: int) -> None:
    command = f"{sys.executable} -m fastckpt ls {path} {closed}"
    done = subprocess.run(command, shell=True, cwd=checkpoint, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    pytest.importorskip("shtab", reason="NOT TESTED HERE: needs shtab")
    status, out, err = call(capsys, "completion", shell)
    assert (status, err) == (0, "")
    for word in ("verify", "completion", "bandwidth-limit", "simulate"):
        assert word in out
    assert call_json(capsys, "completion", shell)[1]["script"].strip() == out.strip()


def test_the_completion_of_bash_knows_commands_options_and_paths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("shtab", reason="NOT TESTED HERE: needs shtab")
    (tmp_path / "script").write_text(call(capsys, "completion", "bash")[1])
    (tmp_path / "step-7").mkdir()
    program = (
        "source ./script; COMP_WORDS=(fastckpt {words}); COMP_CWORD={last}\n"
        "eval \"$(complete -p fastckpt | sed 's/.*-F \\([^ ]*\\).*/\\1/')\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    for words, found in (
        ("ver", "verify"),
        ("copy --band", "--bandwidth-limit"),
        ("verify st", "step-7"),
        ("export st", "step-7"),
        ("bench st", "step-7"),
        ("plan --config x --from st", "step-7"),
        ("export --format s", "safetensors"),
    ):
        text = program.format(words=words, last=len(words.split()))
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.split() == [found], (words, done)


def test_completion_without_its_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, out, err = call(capsys, "completion", "bash")
    assert (status, out) == (2, "")
    assert 'pip install "fastckpt-io[completion]"' in err


# -- import ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.usefixtures("quick_look")
def test_import_from_torch_save(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any], suffix: str, legacy: bool
) -> None:
    source, destination = tmp_path / f"m{suffix}", tmp_path / "out"
    state = {"model": model, "lr": 1e-3, "shapes": [(1, 2), torch.Size([3])], 5: None}
    torch.save(state, source, _use_new_zipfile_serialization=not legacy)
    status, out, err = call(capsys, "import", source, destination)
    assert (status, err) == (0, "")
    assert "5 tensors" in out
    loaded = fastckpt.load(destination)
    assert list(loaded) == list(state)
    assert loaded["lr"] == 1e-3
    assert loaded["shapes"] == state["shapes"]
    assert all(equal(loaded["model"][name], tensor) for name, tensor in model.items())
    assert fastckpt.verify(destination).ok


class Plain:
    """A class that torch does not allow."""


class Bomb:
    """An object whose pickle creates a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_import_never_executes_a_pickle(capsys: pytest.CaptureFixture[str], tmp_path: Path, legacy: bool) -> None:
    source, fired = tmp_path / "evil.pt", tmp_path / "fired"
    torch.save({"w": torch.zeros(2), "x": Bomb(fired)}, source, _use_new_zipfile_serialization=not legacy)
    status, document = call_json(capsys, "import", source, tmp_path / "out")
    assert status == 2
    assert document["type"] == "UnsupportedTypeError"
    assert str(source) in document["error"]
    source.write_bytes(pickle.dumps(Bomb(fired), protocol=2))
    assert call(capsys, "import", source, tmp_path / "out")[0] in (1, 2)
    assert not fired.exists()
    assert not (tmp_path / "out").exists()


def test_import_offers_no_way_around_what_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save({"x": Plain()}, tmp_path / "m.pt")
    status, document = call_json(capsys, "import", tmp_path / "m.pt", tmp_path / "out")
    assert status == 2
    assert "Plain" in document["error"]
    assert "safe_globals" not in document["error"]


def test_import_from_safetensors(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any]) -> None:
    source, destination = tmp_path / "m.safetensors", tmp_path / "out"
    safetensors_torch.save_file(model, source, metadata={"format": "pt", "from": "here"})
    status, document = call_json(capsys, "import", source, destination)
    assert status == 0
    assert document["tensors"] == 5
    assert document["bytes"] == sum(tensor.nbytes for tensor in model.values())
    loaded = fastckpt.load(destination)
    assert loaded.keys() == model.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in model.items())
    with fastckpt.open(destination) as opened:
        assert opened.metadata == {"format": "pt", "from": "here"}


def write_hugging_face(path: Path, model: dict[str, Any]) -> None:
    path.mkdir()
    names = list(model)
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, part in files.items():
        safetensors_torch.save_file({name: model[name] for name in part}, path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_import_from_hugging_face(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any]) -> None:
    source, destination = tmp_path / "hf", tmp_path / "out"
    write_hugging_face(source, model)
    status, _, err = call(capsys, "import", source, destination)
    assert (status, err) == (0, "")
    loaded = fastckpt.load(destination)
    assert list(loaded) == list(model)
    assert all(equal(loaded[name], tensor) for name, tensor in model.items())


def test_import_from_hugging_face_with_one_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any]
) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    safetensors_torch.save_file(model, source / "model.safetensors")
    assert call(capsys, "import", source, tmp_path / "out")[0] == 0
    assert fastckpt.load(tmp_path / "out").keys() == model.keys()


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors", "..", 7])
def test_an_index_does_not_lead_out_of_its_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any], file: Any
) -> None:
    source = tmp_path / "hf"
    write_hugging_face(source, model)
    safetensors_torch.save_file(model, tmp_path / "m.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"steps": file}}))
    status, out, err = call(capsys, "import", source, tmp_path / "out")
    assert (status, out) == (1, "")
    assert "model.safetensors.index.json" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick_look")
def test_damaged_sources_are_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: dict[str, Any]) -> None:
    torch.save(model, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:5000])
    (tmp_path / "empty.pt").touch()
    noise = [f"noise-{seed}.bin" for seed in range(50)]
    for seed, name in enumerate(noise):
        (tmp_path / name).write_bytes(random.Random(seed).randbytes(1000))
    safetensors_torch.save_file(model, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:5000])
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "unknown.npz").touch()
    (tmp_path / "directory").mkdir()
    write_hugging_face(tmp_path / "hf", model)
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    for name in (
        "cut.pt",
        "empty.pt",
        *noise,
        "cut.safetensors",
        "empty.safetensors",
        "unknown.npz",
        "directory",
        "hf",
        "missing",
    ):
        status, out, err = call(capsys, "import", tmp_path / name, tmp_path / "out")
        assert status in (1, 2), name
        assert out == ""
        assert str(tmp_path / name) in err
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()


def test_import_overwrites_only_when_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, model: dict[str, Any]
) -> None:
    source = tmp_path / "m.pt"
    torch.save({"only": torch.ones(3)}, source)
    status, out, err = call(capsys, "import", source, checkpoint)
    assert (status, out) == (2, "")
    assert "--overwrite" in err
    assert fastckpt.load(checkpoint).keys() == model.keys()
    assert call(capsys, "import", source, checkpoint, "--overwrite")[0] == 0
    assert fastckpt.load(checkpoint).keys() == {"only"}

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "model.safetensors").write_text("text")
    assert call(capsys, "import", source, precious, "--overwrite")[0] == 2
    assert (precious / "model.safetensors").read_text() == "text"


def test_what_does_not_go_together_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    for source, destination, more in (
        (checkpoint, "out", ()),
        (tmp_path / "m.pt", "out.safetensors", ()),
        (checkpoint, "out.pt", ("--format", "safetensors")),
        (checkpoint, "step-7/out", ("--format", "dcp")),
    ):
        status, _, err = call(
            capsys, "export" if source == checkpoint else "import", source, tmp_path / destination, *more
        )
        assert status == 2
        assert str(source) in err
        assert not (tmp_path / destination).exists()
    status, _, err = call(capsys, "import", checkpoint, tmp_path / "out")
    assert "it is a checkpoint already" in err
    shard = checkpoint / "model.safetensors"
    fastckpt.save({"w": torch.ones(3)}, tmp_path / "other")
    for command, source, destination, words in (
        ("import", shard, checkpoint, "one is inside the other"),
        ("import", tmp_path, tmp_path / "out", "one is inside the other"),
        ("import", tmp_path / "m.pt", tmp_path / "other" / "out", "other is a checkpoint"),
        ("export", checkpoint, tmp_path / "other" / "model.safetensors", "other is a checkpoint"),
    ):
        status, _, err = call(capsys, command, source, destination, "--overwrite")
        assert status == 2
        assert words in err
    assert fastckpt.verify(checkpoint).ok
    assert fastckpt.verify(tmp_path / "other").ok
    (tmp_path / "other" / "m.pt").write_bytes(b"")
    files = ("--files", tmp_path / "m.pt", "--files", tmp_path / "other" / "m.pt")
    assert "two files of one name" in call(capsys, "export", checkpoint, tmp_path / "h", "--format", "hf", *files)[2]
    for form, flag in (
        ("dcp", "--overwrite"),
        ("torch", "--expand"),
        ("safetensors", "--strip-prefix=x"),
        ("dcp", "--files=x"),
        ("torch", "--shard-size=1GB"),
    ):
        status, _, err = call(capsys, "export", checkpoint, tmp_path / "out", "--format", form, flag)
        assert status == 2
        assert f"export: {flag.partition('=')[0]} is for --format " in err
        assert not (tmp_path / "out").exists()


# -- export ------------------------------------------------------------------------------------------------------------


def test_export_to_safetensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, model: dict[str, Any]
) -> None:
    destination = tmp_path / "m.safetensors"
    status, document = call_json(capsys, "export", checkpoint, destination)
    assert status == 0
    assert document["tensors"] == 5
    loaded = safetensors_torch.load_file(destination)
    assert loaded.keys() == model.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in model.items())
    plain = tmp_path / "plain"
    plain.touch()
    assert destination.stat().st_mode == plain.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "plain", "step-7"]

    status, _, err = call(capsys, "export", checkpoint, destination)
    assert status == 2
    assert "--overwrite" in err
    assert call(capsys, "export", checkpoint, destination, "--overwrite", "--keys", "layer.*", "--keys=steps")[0] == 0
    assert sorted(safetensors_torch.load_file(destination)) == [
        "layer.0.bias",
        "layer.0.weight",
        "layer.1.weight",
        "steps",
    ]


@dataclasses.dataclass
class Rates:
    first: float


@pytest.fixture
def trained(tmp_path: Path, model: dict[str, Any]) -> Path:
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    state = {"model": model, "tied": model["layer.0.bias"], "optimizer": optimizer, "rates": Rates(0.5), "step": 7}
    fastckpt.save(state, tmp_path / "step-7", registry=fastckpt.Registry(Rates))
    return tmp_path / "step-7"


@pytest.mark.filterwarnings("ignore:.*are returned in their stored form:RuntimeWarning")
@pytest.mark.parametrize(("name", "form"), [("m.pt", ()), ("m.pth", ()), ("m.bin", ()), ("m", ("--format", "torch"))])
def test_export_to_torch(
    capsys: pytest.CaptureFixture[str], trained: Path, model: dict[str, Any], name: str, form: tuple[str, ...]
) -> None:
    target = trained.parent / name
    status, document = call_json(capsys, "export", trained, target, *form)
    assert (status, document["format"], document["tensors"]) == (0, "torch", 6)
    loaded = torch.load(target, weights_only=True)
    assert all(equal(loaded["model"][name], tensor) for name, tensor in model.items())
    assert loaded["tied"].data_ptr() == loaded["model"]["layer.0.bias"].data_ptr()
    assert loaded["optimizer"]["state"] == {0: {"step": torch.tensor(3.0)}}
    # An object of an unknown class becomes its contents.
    assert (loaded["rates"], loaded["step"]) == ({"first": 0.5}, 7)
    assert call(capsys, "export", trained, target, *form)[0] == 2
    assert call(capsys, "export", trained, target, *form, "--overwrite", "--keys", "step")[0] == 0
    assert torch.load(target, weights_only=True) == {"step": 7}
    assert sorted(one.name for one in trained.parent.iterdir()) == [name, "step-7"]


@pytest.mark.filterwarnings("ignore:.*are returned in their stored form:RuntimeWarning")
@pytest.mark.usefixtures("quick_look")
def test_export_to_torchs_distributed_checkpoint_and_back(
    capsys: pytest.CaptureFixture[str], trained: Path, model: dict[str, Any]
) -> None:
    target = trained.parent / "torchs"
    assert call(capsys, "export", trained, target, "--format", "dcp")[0] == 0
    assert call(capsys, "import", target, trained.parent / "back")[0] == 0
    loaded = fastckpt.load(trained.parent / "back")
    assert all(equal(loaded["model"][name], tensor) for name, tensor in model.items())
    assert equal(loaded["tied"], model["layer.0.bias"])
    assert list(loaded["optimizer"]["state"]) == [0]
    assert (loaded["rates"], loaded["step"]) == ({"first": 0.5}, 7)
    assert "--overwrite" not in call(capsys, "export", trained, target, "--format", "dcp")[2]
    assert sorted(one.name for one in trained.parent.iterdir()) == ["back", "step-7", "torchs"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_a_full_disk_leaves_nothing_of_an_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    fastckpt.save({"w": torch.ones(1 << 20)}, tmp_path / "c")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        status, out, err = call(capsys, "export", tmp_path / "c", tmp_path / "out", "--format", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, out) == (2, "")
    assert f"cannot export {tmp_path / 'out'}: cannot write it: File too large" in err
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_an_export_is_durable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    fastckpt.save({"w": torch.ones(3)}, tmp_path / "c")
    synced, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(Path(f"/proc/self/fd/{file}").readlink()), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (synced.append("renamed"), replace(*paths)))
    assert call(capsys, "export", tmp_path / "c", tmp_path / "out", "--format", form)[0] == 0
    at = synced.index("renamed")
    (out,) = {one for one in synced[:at] if one.name == "out"}
    assert out.parent.parent == tmp_path
    assert {one.parent if form == "dcp" else one for one in synced[:at]} >= {out}
    assert tmp_path in synced[at:]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["c", "out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_an_export_that_is_ended_leaves_nothing(
    children_with_torch: zygote.Zygote, tmp_path: Path, form: str, number: int
) -> None:
    here, program = tmp_path / "here", tmp_path / "program.py"
    here.mkdir()
    fastckpt.save({"w": torch.ones(3)}, here / "c")
    program.write_text(f"""
import os, sys
from harness import cli
sync = os.fsync
os.fsync = lambda file: (os.kill(os.getpid(), {int(number)}), sync(file))
sys.exit(cli.main(["export", *sys.argv[1:], "--format", "{form}"]))
""")
    done = programs.run(children_with_torch, [program, here / "c", here / "out"])
    assert done.returncode == (130 if number == signal.SIGINT else -number), done.stderr
    assert [one.name for one in here.iterdir()] == ["c"]


def test_what_torchs_distributed_checkpoint_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, cause in (
        ([torch.ones(3)], "its state is a list"),
        ({"w": torch.eye(2).to_sparse()}, "refuses its state"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "refuses its state"),
        ({"w": torch.ones(1).expand(20 << 20)}, "give --expand"),
    ):
        fastckpt.save(state, tmp_path / "c", overwrite=True)
        status, _, err = call(capsys, "export", tmp_path / "c", tmp_path / "out", "--format", "dcp")
        assert status == 2
        assert cause in err
        assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_keys_export_tensors_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2), "name": "x", "n": [None, 1.5, torch.Size([1])]},
        "sparse": torch.eye(2).to_sparse(),
    }
    fastckpt.save(state, tmp_path / "c")
    target = tmp_path / "m.safetensors"
    assert call(capsys, "export", tmp_path / "c", target, "--keys", "model.*")[0] == 0
    assert list(safetensors_torch.load_file(target)) == ["model.w"]
    target.unlink()
    for pattern, reason in (("model.name", "chooses no tensor"), ("sparse.*", "layout torch.sparse_coo")):
        status, _, err = call(capsys, "export", tmp_path / "c", target, "--keys", pattern)
        assert status == 2
        assert reason in err
        assert not target.exists()


def test_nested_tied_and_numpy_tensors_get_flat_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    state = {
        "model": {"a": weight, "b": weight, "list": [torch.zeros(0), np.arange(3)]},
        "model.a": torch.ones(1),
        3: torch.nn.Parameter(torch.ones(2).t()),
    }
    fastckpt.save(state, tmp_path / "c")
    status, _, err = call(capsys, "export", tmp_path / "c", tmp_path / "m.safetensors")
    assert (status, err) == (0, "")
    loaded = safetensors_torch.load_file(tmp_path / "m.safetensors")
    assert set(loaded) == {"model.a", "model.b", "model.list.0", "model.list.1", "model.a~1", "3"}
    assert equal(loaded["model.a"], weight)
    assert equal(loaded["model.b"], weight)
    assert equal(loaded["model.list.1"], torch.arange(3))
    assert equal(loaded["model.a~1"], torch.ones(1))


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (1e-3, "float"),
        (None, "NoneType"),
        (b"x", "bytes"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.zeros(2, np.complex128), "complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, leaf: Any, named: str
) -> None:
    fastckpt.save({"model": {"w": torch.ones(2)}, "other": [leaf]}, tmp_path / "c")
    status, document = call_json(capsys, "export", tmp_path / "c", tmp_path / "m.safetensors")
    assert status == 2
    assert document["type"] == "UnsupportedTypeError"
    assert "['other'][0]" in document["error"]
    assert named in document["error"]
    assert not (tmp_path / "m.safetensors").exists()

    assert call(capsys, "export", tmp_path / "c", tmp_path / "m.safetensors", "--keys", "model.*")[0] == 0
    assert list(safetensors_torch.load_file(tmp_path / "m.safetensors")) == ["model.w"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp", "hf"])
def test_a_damaged_checkpoint_is_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, form: str
) -> None:
    damage(checkpoint)
    status, _, err = call(capsys, "export", checkpoint, tmp_path / "m", "--format", form)
    assert status == 1
    assert "model.safetensors" in err
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


# -- help --------------------------------------------------------------------------------------------------------------


def test_a_path_is_named_whatever_it_is_called(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.pt").touch()
    assert cli.main(["export", str(checkpoint), "e.pt"]) == 2
    assert "cannot export e.pt: it exists" in capsys.readouterr().err
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").touch()
    assert cli.main(["import", "d", "new"]) == 1
    assert "cannot import d: .metadata is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["info", "PATH", "--js"], ["verify", "--jso", "PATH"], ["--vers"]])
def test_options_have_their_whole_names(tmp_path, capsys, arguments):
    fastckpt.save({"w": np.zeros(1)}, tmp_path / "c")
    assert cli.main([str(tmp_path / "c") if one == "PATH" else one for one in arguments]) == 2
    assert "arguments" in capsys.readouterr().err


# The path is a directory of checkpoints.


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for step in (900, 1000):
        fastckpt.save({"w": np.zeros(1000)}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_ls_of_a_directory_lists_its_checkpoints(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    (steps / "step-900" / "model.safetensors").unlink()
    status, document = call_json(capsys, "ls", steps)
    assert status == 0
    assert [one["name"] for one in document["checkpoints"]] == ["step-900", "step-1000"]
    assert document["checkpoints"][1]["damage"] is None
    assert document["bytes"] == sum(one["bytes"] for one in document["checkpoints"])
    status, out, err = call(capsys, "ls", steps)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["name", "created", "size"]
    assert "cannot be found" in out.splitlines()[1]
    assert out.splitlines()[-1].startswith("2 checkpoints, ")
    # A pattern applies only to the tensors of one checkpoint.
    assert call(capsys, "ls", steps, "step-*")[0] == 2


def test_rm_removes_one_and_leaves_what_others_put_there(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    (steps / "step-900" / "notes.txt").write_text("mine")
    status, out, err = call(capsys, "rm", steps / "step-900")
    assert (status, out) == (2, "")
    assert "notes.txt" in err
    assert call_json(capsys, "rm", steps / "step-900", "--force") == (
        0,
        {"schema": "fastckpt/rm/1", "path": str(steps / "step-900"), "removed": True},
    )
    assert [one.name for one in steps.iterdir()] == ["step-1000"]
    assert call(capsys, "rm", steps / "step-900")[0] == 2


def test_pin_and_unpin(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    assert call(capsys, "pin", steps / "step-900") == (0, f"pinned {steps / 'step-900'}\n", "")
    assert call(capsys, "prune", steps, "--keep", "last=1", "--yes")[0] == 0
    assert sorted(one.name for one in steps.iterdir() if one.is_dir()) == ["step-1000", "step-900"]
    status, document = call_json(capsys, "pin", steps / "step-900", "--off")
    assert (status, document["pinned"], document["step"]) == (0, False, 900)
    assert call(capsys, "prune", steps, "--keep", "last=1", "--yes")[0] == 0
    assert [one.name for one in steps.iterdir() if one.is_dir()] == ["step-1000"]
    for arguments, text in (
        (["pin", steps / "step-900"], "there is no such checkpoint"),
        (["pin", steps / "final"], "has no step number"),
        (["pin", "s3://bucket/step-1"], "is a URL"),
    ):
        status, out, err = call(capsys, *arguments)
        assert (status, out) == (2, "")
        assert text in err


def test_top_runs_the_monitor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["top", "--version"]) == 0
    assert capfd.readouterr().out.startswith("fastckpt-top ")
    assert cli.main(["--json", "top", "--once"]) == 0
    assert capfd.readouterr().out.startswith(("{", "["))
    assert cli.main(["--quiet", "top", "--once"]) == 0
    assert capfd.readouterr().out == ""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert cli.main(["top"]) == 2
    assert "pip install fastckpt-top" in capfd.readouterr().err
