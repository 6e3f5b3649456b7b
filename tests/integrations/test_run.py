"""``fastckpt run``: a program and the processes that it starts save through fastckpt with unchanged code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from harness import zygote

HERE = Path(__file__).parent


def run(folder, *arguments, path="", **variables):
    environment = {**zygote.environment(), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment["PYTHONPATH"]]))
    return subprocess.run(
        [sys.executable, "-m", "fastckpt", "run", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_the_program_takes_the_place_of_the_command(tmp_path):
    """Arguments, standard output and exit status belong to the program."""
    (tmp_path / "p.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    for command in (["--", "p.py", "--json", "-x"], ["--", sys.executable, "p.py", "--json", "-x"]):
        done = run(tmp_path, *command)
        assert (done.returncode, done.stdout) == (7, "['--json', '-x']\n"), done.stderr


def test_a_framework_gets_its_door_when_it_is_imported_also_in_a_child(tmp_path):
    """A library that the program does not import costs nothing."""
    child = "subprocess.run([sys.executable, '-W', 'ignore', 'child.py'], check=True)"
    (tmp_path / "p.py").write_text(f"import subprocess, sys; {child}; print('fastckpt' in sys.modules)")
    source = "import fastckpt.integrations.transformers as d; print(d._installed.options is not None, flush=True)"
    (tmp_path / "child.py").write_text(f"import transformers.trainer; {source}")
    done = run(tmp_path, "--", "p.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nFalse\n"


def test_a_program_on_accelerate(tmp_path):
    (tmp_path / "p.py").write_text(
        "import accelerate, torch\n"
        "accelerator = accelerate.Accelerator(cpu=True)\n"
        "accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "accelerator.save_state('step-1')\n"
    )
    done = run(tmp_path, "--", "p.py", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    assert fastckpt.verify(tmp_path / "step-1").ok


def test_the_sitecustomize_of_the_environment_is_imported_too(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("MINE = 5")
    (tmp_path / "p.py").write_text("import sitecustomize; print(sitecustomize.MINE)")
    done = run(tmp_path, "--", "p.py", path=str(tmp_path / "site"))
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: give a command after --"),
        (["--", "no-such-program"], "no-such-program: no such command"),
    ],
)
def test_what_cannot_be_run(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_without_its_package(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'wrapt' else f(name, package)"
    )
    done = run(tmp_path, "--", "true", path=str(tmp_path))
    assert done.returncode == 2
    assert 'pip install "fastckpt-io[run]"' in done.stderr


def test_a_framework_that_a_door_does_not_fit_saves_by_itself(tmp_path):
    """The framework may have another version: then the program continues, with a message."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '3.0'")
    (tmp_path / "transformers" / "trainer.py").write_text("")
    (tmp_path / "p.py").write_text("import transformers.trainer; print('on')")
    done = run(tmp_path, "--", "p.py", path=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert done.stderr.startswith("fastckpt run: transformers 3.0 saves as it does without fastckpt: ImportError")
