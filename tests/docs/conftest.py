"""The site, built once for all tests of this folder, in whatever process they run."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from harness import needs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The directory of the site, as scripts/docs builds it."""
    if sys.version_info < (3, 11):
        needs.missing("needs CPython 3.11: the tree of the site is a TOML file")
    needs.package("sphinx")
    # The workers of one run have this directory in common.
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    built, said = shared / "site", shared / "site.log"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", ROOT / "scripts" / "docs", built],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=250,
            )
            said.write_text(done.stdout, encoding="utf-8")
    assert built.is_dir(), said.read_text(encoding="utf-8")
    return built
