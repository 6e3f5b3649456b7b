"""The wheel alone, in an environment without fastckpt, shows a job of another environment."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import fastckpt_top
import pytest

from harness import needs

TUI = Path(__file__).parents[2] / "tui"


def test_nothing_of_fastckpt_or_torch_is_imported():
    allowed = {"fastckpt_top", "textual", "rich", "platformdirs"} | sys.stdlib_module_names
    for path in Path(fastckpt_top.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed, path


@pytest.mark.slow
def test_the_wheel_installs_alone_and_shows_a_job(tmp_path, producer, place):
    wheels, source = tmp_path / "wheels", tmp_path / "tui"
    shutil.copytree(
        TUI, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    )  # builds write there
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("fastckpt_top-0.1.0-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fastckpt_top/py.typed", "fastckpt_top/schema.json", "fastckpt_top/views/live.py"} <= set(names)
    assert all(name.startswith("fastckpt_top") for name in names)
    # No pip in the environment: its installation takes longer than the wheel's.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", str(wheel)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        needs.missing(f"needs a package index: {done.stderr[-200:]}")
    assert subprocess.run([python, "-c", "import fastckpt"], check=False, capture_output=True).returncode == 1
    producer("--rate", 1e9)
    env = {"FASTCKPT_TOP_DIR": str(place), "PATH": os.environ["PATH"]}
    command = [tmp_path / "venv" / "bin" / "fastckpt-top", "--once", "-d", "0.3"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)
    assert "save step-7" in shown.stdout
    drawn = "import textual.app, fastckpt_top.app"
    subprocess.run([python, "-c", drawn], check=True, capture_output=True)
