"""A user's first steps, with an index on this machine: the commands of docs/install.md, and a guide."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, GUIDE = ROOT / "docs" / "install.md", ROOT / "docs" / "guides" / "plain.md"
#: The guide's imports beside fastckpt. torch and its dependencies are gigabytes, so the index does not have them.
BORROWED = ("torch", "torchdata")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log no request."""


@contextmanager
def index(at: Path, *directories: Path) -> Iterator[str]:
    """A package index of the files in the directories, laid out in `at`: yields its address on loopback."""
    for file in (file for directory in directories for file in directory.iterdir()):
        project = at / re.sub(r"[-_.]+", "-", file.name.split("-")[0]).lower()
        project.mkdir(parents=True, exist_ok=True)
        if not (project / file.name).exists():
            (project / file.name).symlink_to(file.resolve())
    # An index shows a project as links to its files, like the list of a directory.
    handler = functools.partial(_Quiet, directory=str(at))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def commands(heading: str) -> list[str]:
    """The shell's lines in a section of docs/install.md."""
    section = PAGE.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^    (\S.*)$", section, re.MULTILINE)


def six_commands() -> list[str]:
    """The commands from an empty directory to a checkpoint."""
    return commands("From an empty directory to a checkpoint")


def fresh(place: Path) -> dict[str, str]:
    """The variables of a new user's shell, with the python3 from which this one was made; the files go into `place`."""
    (place / "path").mkdir()
    (place / "path" / "python3").symlink_to(sys._base_executable)  # noqa: SLF001
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "FASTCKPT_"))}
    return {
        **kept,
        "PATH": f"{place / 'path'}:{os.environ['PATH']}",
        "HOME": str(place),
        "FASTCKPT_TOP_DIR": str(place / "segments"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }


def first_steps(where: Path, address: str, environment: dict[str, str]) -> Iterator[str]:
    """Run the six commands in an empty directory, with the index in place of a directory of wheels; the problems."""
    said = []
    for command in six_commands():
        line = command.replace("--no-index --find-links wheels ", f"--index-url {address} ")
        done = _run(where, environment, "sh", "-c", line)
        said.append(done.stdout)
        if done.returncode or done.stderr:
            yield f"{line}: status {done.returncode}: {done.stdout}{done.stderr}"
            return
    expected = (
        "",
        "Successfully installed",
        "saved 80.00 MB",
        "save step-1: 0.08 of 0.08 GB, done",
        "1\n",
        "no damage",
    )
    yield from (f"no {words!r} in: {text}" for words, text in zip(expected, said, strict=True) if words not in text)


def guide(python: Path, where: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run the guide's first program twice, in an environment that borrows torch from this one; the problems."""
    program = where / "guide.py"
    program.write_text(
        re.search(r"^```python\n(.+?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)[1], "utf-8"
    )
    homes = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in BORROWED}
    borrow = f"import sys, runpy, fastckpt; sys.path += {sorted(homes)}; runpy.run_path({program.name!r})"
    verify = [(python.parent / "fastckpt", "verify", path) for path in ("release", "runs/plain/step-00000120")]
    again = (python, "-c", borrow)  # the second time, it continues where it ended
    for command in (again, again, *verify):
        done = _run(where, environment, *command)
        if done.returncode:
            yield f"{GUIDE.name}: {' '.join(map(str, command))}: {done.stdout}{done.stderr}"


def _run(where: Path, environment: dict[str, str], *command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [*map(str, command)], cwd=where, env=environment, check=False, capture_output=True, text=True
    )
