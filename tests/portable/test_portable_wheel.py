"""The wheel for other platforms installs into an empty environment, and reads checkpoints there."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import needs

SCRIPT = Path(__file__).parents[2] / "scripts" / "portable-wheel"


@pytest.mark.slow
def test_the_wheel_installs_alone_and_reads(tmp_path):
    needs.package("setuptools")
    subprocess.run([sys.executable, SCRIPT, tmp_path / "wheels"], check=True, capture_output=True, timeout=240)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"fastckpt_io-{fastckpt.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "fastckpt/py.typed" in names
    assert not any(name.endswith((".so", ".pyd")) for name in names)
    assert 'Requires-Dist: anycrc>=2; sys_platform != "linux"' in about
    # The environment has no pip, which would take longer to install than the wheel.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    # On Linux, the wheel does not require the package that other platforms need.
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel, "anycrc>=2"]
    done = subprocess.run(install, check=False, capture_output=True, text=True, timeout=240)
    if done.returncode:
        needs.missing(f"needs a package index: {done.stderr[-200:]}")
    fastckpt.save({"a": np.arange(10), "b": [1, "x"]}, tmp_path / "c")
    program = f"import fastckpt; print(fastckpt.__version__, fastckpt.load({str(tmp_path / 'c')!r}))"
    shown = subprocess.run([python, "-W", "error", "-c", program], check=True, capture_output=True, text=True).stdout
    assert shown == f"{fastckpt.__version__} {{'a': array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), 'b': [1, 'x']}}\n"
    command = tmp_path / "venv" / "bin" / "fastckpt"
    done = subprocess.run([command, "verify", tmp_path / "c"], check=True, capture_output=True, text=True)
    assert "verified" in done.stdout
