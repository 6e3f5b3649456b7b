"""Counts the lines of product code per folder and compares them with the budgets in ``pyproject.toml``.

    python scripts/checks/budgets.py

Blank lines and comments count. Tests do not: the part of a Rust file after ``#[cfg(test)]``, and test files.

No Python function has more than 60 lines below its signature and docstring; clippy counts those in Rust.

Test files that name private modules, in imports or in the text of programs, are counted separately: each has to
change when a private module moves.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The most lines that a function may have.
LONGEST = 60
#: A private module of the package, or a private name imported from it; ``__version__`` and its like are public.
PRIVATE = re.compile(r"\bfastckpt(?:\.\w+)*\._(?!_)\w|\bfrom fastckpt(?:\.\w+)* import (?:\([^)]*|[^\n(]*)\b_(?!_)\w")


def count(file: Path) -> int:
    """The shipped lines of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".rs":
        text = text.partition("\n#[cfg(test)]\nmod tests {")[0]
    return text.count("\n")


def is_product(file: Path) -> bool:
    """Whether it is shipped code, not a test, benchmark or example."""
    aside = {"tests", "benches", "examples"}.intersection(file.parts) or file.stem == "tests"
    return file.suffix in {".py", ".pyi", ".rs"} and not aside


def sizes(folders: list[str]) -> dict[str, int]:
    """The number of lines below each folder, without those of deeper folders in the list."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    found = dict.fromkeys(folders, 0)
    for name in map(Path, listed.stdout.splitlines()):
        if is_product(name):
            mine = max((folder for folder in folders if name.is_relative_to(folder)), key=len)
            found[mine] += count(ROOT / name)
    return found


def long_functions(folders: list[str]) -> Iterator[str]:
    """The functions that are too long, with their lines."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in map(Path, listed.stdout.splitlines()):
        if is_product(name) and name.suffix == ".py":
            for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                    lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
                    if lines > LONGEST:
                        yield f"{name}:{node.lineno}: {node.name} has {lines} lines, and may have {LONGEST}"


def private_tests(directory: Path = ROOT / "tests") -> list[str]:
    """The test files that name private modules."""
    files = (file for file in sorted(directory.rglob("*.py")) if PRIVATE.search(file.read_text(encoding="utf-8")))
    return [file.relative_to(directory).as_posix() for file in files]


def main() -> int:
    """Print the table; 1 if a folder is over its budget, a function is too long, or tests name too many modules."""
    if sys.version_info < (3, 11):
        print("budgets: not counted: reading pyproject.toml needs CPython 3.11")
        return 0
    import tomllib  # noqa: PLC0415 - newer than the oldest CPython

    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets: dict[str, int] = document["tool"]["fastckpt"]["budgets"]
    found = sizes(list(budgets))
    for folder, lines in found.items():
        over = " OVER: remove lines, or argue for more in pyproject.toml" if lines > budgets[folder] else ""
        print(f"{folder:40} {lines:6,} of {budgets[folder]:6,}{over}")
    long = [*long_functions(list(budgets))]
    print(*long, sep="\n", end="\n" * bool(long))
    private, most = private_tests(), document["tool"]["fastckpt"]["private-tests"]
    over = f" OVER: use the public API or the harness, or the unit tests of the folder: {private}"
    print(f"{'tests that name private modules':40} {len(private):6} of {most:6}{over if len(private) > most else ''}")
    return int(len(private) > most or bool(long) or any(lines > budgets[folder] for folder, lines in found.items()))


if __name__ == "__main__":
    sys.exit(main())
