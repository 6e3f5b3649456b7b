"""Forked workers behave like ordinary workers."""

from __future__ import annotations

import os
import subprocess
import sys

from harness import needs, zygote

CONFTEST = """
from harness import workers

def pytest_configure(config):
    if config.getoption("numprocesses", 0):
        forked = workers.trunk(config.invocation_params.args)
        config.option.tx = [forked.__enter__()] * len(config.option.tx)
        config.add_cleanup(lambda: forked.__exit__(None, None, None))
"""
TESTS = """
import os, signal, sys
import pytest

print(os.getpid(), file=open("imported", "a"))

@pytest.mark.parametrize("number", range(20))
def test_one(number):
    print(os.getpid(), os.getppid(), os.environ["COLOUR"], os.getcwd(), *sys.argv, file=open("ran", "a"))
    if number == 3 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 7:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
"""


def test_workers_are_forked_from_what_is_imported_once(tmp_path):
    """A worker that dies is reported and replaced."""
    needs.package("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--rootdir=.", "test_it.py"]
    variables = {**zygote.environment(), "COLOUR": "grün"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "1 failed, 19 passed" in done.stdout, done
    assert "crashed while running 'test_it.py::test_one[3]'" in done.stdout
    (trunk,) = (tmp_path / "imported").read_text().split()
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert [line[1:] for line in ran] == [[trunk, "grün", str(tmp_path), "-c"]] * 20
    workers = {int(line[0]) for line in ran}
    assert len(workers) >= 2
    assert not [pid for pid in (*workers, int(trunk)) if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110
