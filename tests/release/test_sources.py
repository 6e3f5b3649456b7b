"""The source distribution."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from harness import needs

ROOT = Path(__file__).parents[2]


def test_cargo_accepts_its_lock_file(tmp_path):
    """A build with ``--locked`` needs a Cargo.lock without crates that the distribution leaves out."""
    cargo = needs.tool("cargo", "cargo")
    subprocess.run([Path(sys.executable).with_name("maturin"), "sdist", "--out", tmp_path], cwd=ROOT, check=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / packed.name.removesuffix(".tar.gz")
    # The crates of other platforms may not have been downloaded.
    question = [cargo, "metadata", "--locked", "--offline", "--format-version=1"]
    question += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    subprocess.run(question, cwd=unpacked, stdout=subprocess.DEVNULL, check=True)
