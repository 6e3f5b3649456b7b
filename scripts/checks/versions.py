"""One version everywhere: Cargo's workspace, the monitor's project and module, the change log, the name of a tag."""

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
    """The version of the workspace, which is that of fastckpt-io."""
    return _first(r'^version = "(.+?)"', root / "Cargo.toml")


def different(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """A line for each place that names another version than Cargo.toml. Without a tag, the log may say Unreleased."""
    version = of_cargo(root)
    monitor = "tui/pyproject.toml", "tui/src/fastckpt_top/__init__.py"
    logged = _first(r"^## \[(.+?)\]", root / "CHANGELOG.md")
    found = [(name, _first(r'^(?:__version__|version) = "(.+?)"', root / name)) for name in monitor]
    wrong = [f"{name} has {has}, Cargo.toml {version}" for name, has in found if has != version]
    if logged != version and not (logged == "Unreleased" and tag is None):
        wrong.append(f"CHANGELOG.md begins with {logged}, Cargo.toml has {version}")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag is {tag}, and v{version} is expected")
    return wrong
