"""The commands of docs/install.md, unchanged, in an empty directory: install, save, watch, load."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import fastckpt
from checks import rehearsal
from harness import needs

ROOT = Path(__file__).parents[2]


def shell(command, where, environment, status=0):
    done = subprocess.run(
        ["sh", "-c", command], cwd=where, env=environment, check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == status, (command, done.stdout, done.stderr)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The directory of wheels that the page collects: fastckpt's and those of its requirements, for this Python."""
    built = sorted((ROOT / "target" / "wheels").glob("*.whl"))
    if not {"fastckpt_io", "fastckpt_top"} <= {wheel.name.split("-")[0] for wheel in built}:
        needs.missing("needs the wheels in target/wheels (GROUP=dev scripts/setup)")
    (collect,) = rehearsal.commands("Offline, from wheels at hand")
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
@pytest.mark.timeout(1200)  # pip and its index are slow, and the time of the fixture counts, too
def test_six_commands_from_an_empty_directory(tmp_path, wheels):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "wheels").symlink_to(wheels)
    lines = rehearsal.six_commands()
    assert len(lines) <= 6
    environment = rehearsal.fresh(tmp_path)
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
    # The damage shows that the last command really verifies.
    shard = next((empty / "step-1").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    shell(verify, empty, environment, status=1)
    shutil.rmtree(empty)  # 200 MB


def test_an_index_shows_projects_by_their_names_and_their_files(tmp_path):
    """scripts/release installs from this index. pip reads a page of links for each project."""
    for directory, name in (
        ("ours", "fastckpt_io-1-any.whl"),
        ("ours", "fastckpt_io-1.tar.gz"),
        ("theirs", "A.b-2.whl"),
    ):
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / name).write_text(name, "utf-8")
    with rehearsal.index(tmp_path / "index", tmp_path / "ours", tmp_path / "theirs") as address:
        assert address.startswith("http://127.0.0.1:")

        def read(path):
            with urllib.request.urlopen(address + path, timeout=60) as answer:
                return answer.read().decode()

        assert re.findall(r'href="(.+?)"', read("fastckpt-io/")) == ["fastckpt_io-1-any.whl", "fastckpt_io-1.tar.gz"]
        assert re.findall(r'href="(.+?)"', read("a-b/")) == ["A.b-2.whl"]
        assert read("a-b/A.b-2.whl") == "A.b-2.whl"


def test_first_steps_that_go_wrong_are_said(tmp_path, monkeypatch):
    """The result is the line that failed and its output, and no later line; or the output that a line should have."""
    environment = rehearsal.fresh(tmp_path)
    monkeypatch.setattr(rehearsal, "six_commands", lambda: ["pwd", "false --no-index --find-links wheels x", "pwd"])
    found = list(rehearsal.first_steps(tmp_path, "http://127.0.0.1:9/", environment))
    assert found == ["false --index-url http://127.0.0.1:9/ x: status 1: "]
    monkeypatch.setattr(rehearsal, "six_commands", lambda: [":"] * 6)
    found = list(rehearsal.first_steps(tmp_path, "", environment))
    assert len(found) == 5
    assert found[1] == "no 'saved 80.00 MB' in: "
