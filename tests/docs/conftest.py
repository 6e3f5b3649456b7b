"""The site, built once for all tests of this folder, even in several processes."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from harness import needs, programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory, request):
    """The directory of the site that scripts/docs builds, in a process that has imported what the reference needs."""
    if sys.version_info < (3, 11):
        needs.missing("needs CPython 3.11: the tree of the site is a TOML file")
    needs.package("sphinx")
    # The workers of one test run share this directory.
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    built, said = shared / "site", shared / "site.log"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            children = request.getfixturevalue("libraries").zygote
            done = programs.run(children, [ROOT / "scripts" / "docs", built], timeout=250)
            said.write_text(done.stdout + done.stderr, encoding="utf-8")
    assert built.is_dir(), said.read_text(encoding="utf-8")
    return built
