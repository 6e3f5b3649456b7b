"""The commands of docs/install.md, as they stand there, in an empty directory: install, save, watch, load."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from harness import needs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "install.md"


def commands(heading):
    """The shell's lines in a section of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^    (\S.*)$", section, re.MULTILINE)


def shell(command, where, environment, status=0):
    done = subprocess.run(
        ["sh", "-c", command], cwd=where, env=environment, check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == status, (command, done.stdout, done.stderr)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The directory of wheels that the page collects: ours, and what they need, for this Python."""
    built = sorted((ROOT / "target" / "wheels").glob("*.whl"))
    if not {"fastckpt_io", "fastckpt_top"} <= {wheel.name.split("-")[0] for wheel in built}:
        needs.missing("needs the wheels in target/wheels (GROUP=dev scripts/setup)")
    (collect,) = commands("Offline, from wheels at hand")
    assert collect.startswith("pip ")
    directory = tmp_path_factory.mktemp("collected")
    (directory / "target").mkdir()
    (directory / "target" / "wheels").symlink_to(ROOT / "target" / "wheels")
    try:
        done = subprocess.run(
            ["sh", "-c", collect.replace("pip", f"'{sys.executable}' -m pip --quiet", 1)],
            cwd=directory,
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        needs.missing("needs a package index that answers: pip took more than 10 minutes to collect the wheels")
    if done.returncode:
        needs.missing(f"needs a package index: {done.stderr[-300:]}")
    yield directory / "wheels"
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # pip and its index set the pace: the time of the fixture counts, too
def test_six_commands_from_an_empty_directory(tmp_path, wheels):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "wheels").symlink_to(wheels)
    lines = commands("From an empty directory to a checkpoint")
    assert len(lines) <= 6
    # As in a fresh shell, with the python3 that this environment was made of, and nobody else's counters.
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "python3").symlink_to(sys._base_executable)
    environment = {
        "PATH": f"{tmp_path / 'path'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FASTCKPT_TOP_DIR": str(tmp_path / "segments"),
    }
    make, install, save, watch, load, verify = lines
    assert "--no-index" in install
    shell(make, empty, environment)
    out, _ = shell(install, empty, environment)
    assert f"fastckpt-io-{fastckpt.__version__} fastckpt-top-" in out
    for python_line in (save, load):
        assert "torch" not in python_line
    out, err = shell(save, empty, environment)
    assert (out[:14], err) == ("saved 80.00 MB", "")
    assert (empty / "step-1").is_dir()
    out, err = shell(watch, empty, environment)
    assert not err
    assert "save step-1: 0.08 of 0.08 GB, done" in out
    assert shell(load, empty, environment) == ("1\n", "")
    out, err = shell(verify, empty, environment)
    assert not err
    assert out.startswith("verified 80.00 MB")
    assert out.endswith("no damage\n")
    # That the last command looks at anything at all.
    shard = next((empty / "step-1").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    shell(verify, empty, environment, status=1)
    shutil.rmtree(empty)  # 200 MB
