"""One version everywhere: Cargo's workspace, the monitor's project, the change log, and the name of a tag."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text("utf-8"), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} has no line like {pattern}")
    return found[1]


def of_cargo(root: Path = ROOT) -> str:
    """The version of the workspace, which fastckpt-io takes."""
    return _first(r'^version = "(.+?)"', root / "Cargo.toml")


def different(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """A line for each place that names another version than Cargo.toml. Before a tag, the log may say Unreleased."""
    version = of_cargo(root)
    monitor = _first(r'^version = "(.+?)"', root / "tui" / "pyproject.toml")
    logged = _first(r"^## \[(.+?)\]", root / "CHANGELOG.md")
    wrong = []
    if monitor != version:
        wrong.append(f"tui/pyproject.toml has {monitor}, Cargo.toml {version}")
    if logged != version and not (logged == "Unreleased" and tag is None):
        wrong.append(f"CHANGELOG.md begins with {logged}, Cargo.toml has {version}")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag is {tag}, and v{version} is expected")
    return wrong
