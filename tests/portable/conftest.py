"""The package as on a laptop: the same files without the compiled core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from harness import zygote


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """A directory with the package, but without the core."""
    directory = tmp_path_factory.mktemp("portable")
    unwanted = shutil.ignore_patterns("_core*.so", "__pycache__")
    shutil.copytree(Path(fastckpt.__file__).parent, directory / "fastckpt", ignore=unwanted)
    assert not [*directory.rglob("*.so")]
    return directory


@pytest.fixture
def laptop(package):
    """A function that runs a program with a package that has no core, and returns the output."""

    def run(program, *arguments, status=0):
        path = os.pathsep.join((str(package), zygote.environment()["PYTHONPATH"]))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    return run
