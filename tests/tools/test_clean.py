"""``fastckpt clean``: leftovers of killed saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import cli, manifest


@pytest.fixture
def left(tmp_path):
    """A checkpoint, and workspaces of this process, of an ended process and of an unknown writer."""
    fastckpt.save({"a": np.zeros(3)}, tmp_path / "step-2")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:16]
    space = Path("/proc/self/ns/pid").stat().st_ino

    def make(owner):
        directory = tmp_path / f".step-1.tmp-{owner}-0123abcd"
        directory.mkdir()
        (directory / "fastckpt.json").touch()
        (directory / "model.safetensors").write_bytes(bytes(8192))
        return directory

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    made = {
        "alive": make(f"node7-{boot}-{space}-{os.getpid()}-0"),
        "dead": make(f"node7-{boot}-{space}-{ended.pid}-0"),
        "unknown": make("node8-0000000000000001-1-1-1"),
    }
    held = manifest.lock(made["alive"])
    yield made
    os.close(held)


def clean(capsys, *arguments):
    status = cli.main(["clean", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_listing_changes_nothing(left, tmp_path, capsys):
    status, document = clean(capsys, tmp_path)
    assert status == 0
    assert {one["name"]: one["state"] for one in document["leftovers"]} == {
        path.name: state for state, path in left.items()
    }
    for one in document["leftovers"]:
        assert one["checkpoint"] == "step-1"
        assert one["host"] == ("node8" if one["state"] == "unknown" else "node7")
        assert one["bytes"] >= 8192
        assert abs(one["changed"] - time.time()) < 3600
        assert not one["removed"]
    assert all(path.exists() for path in left.values())
    assert cli.main(["clean", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("step-1", "node8", "its writer is running", "3 leftovers stayed"):
        assert word in text


def test_the_dead_are_removed_and_what_is_unknown_when_it_is_old(left, tmp_path, capsys):
    _, document = clean(capsys, tmp_path, "--yes")
    assert [one["state"] for one in document["leftovers"] if one["removed"]] == ["dead"]
    assert [state for state, path in left.items() if path.exists()] == ["alive", "unknown"]
    clean(capsys, tmp_path, "--yes", "--older-than", "1h")
    assert left["unknown"].exists()
    clean(capsys, tmp_path, "--yes", "--older-than", "0")
    assert [state for state, path in left.items() if path.exists()] == ["alive"]
    assert fastckpt.verify(tmp_path / "step-2").ok


def test_nothing_to_clean(tmp_path, capsys):
    assert cli.main(["clean", str(tmp_path)]) == 0
    assert "nothing is left over" in capsys.readouterr().out


def test_what_cannot_be_cleaned_is_an_error(tmp_path, capsys):
    assert cli.main(["clean", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
    assert cli.main(["clean", str(tmp_path), "--yes", "--older-than", "24"]) == 2
    assert "--older-than '24' would be seconds: give it a unit, as in '24h'" in capsys.readouterr().err


def test_what_would_be_removed_is_shown_first(left, tmp_path, capsys):
    _, document = clean(capsys, tmp_path)
    assert [one["state"] for one in document["leftovers"] if one["due"]] == ["dead"]
    _, document = clean(capsys, tmp_path, "--older-than", "0")
    assert sorted(one["state"] for one in document["leftovers"] if one["due"]) == ["dead", "unknown"]
    assert not any(one["removed"] for one in document["leftovers"])
    assert cli.main(["clean", str(tmp_path)]) == 0
    assert "dead: would be removed" in capsys.readouterr().out
    assert all(path.exists() for path in left.values())
