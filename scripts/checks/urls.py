"""The addresses of the project: pyproject.toml has them, other files repeat them, and a release needs real ones."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The names of the addresses that an index shows beside a distribution.
NAMES = ("Homepage", "Documentation", "Source", "Issues", "Security", "Changelog")
#: The end of a host that never exists (RFC 2606), which marks a placeholder.
UNSET = ".invalid"


def of(project: Path) -> dict[str, str]:
    """The addresses in a pyproject.toml, by name."""
    table = re.search(r"^\[project\.urls\]\n((?:\w.*\n)*)", project.read_text("utf-8"), re.MULTILINE)
    return dict(re.findall(r'^(\w+) = "(.+)"$', table[1], re.MULTILINE)) if table else {}


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """A line for each address that is missing or differs; before a tag, for each placeholder, too."""
    ours, monitors = of(root / "pyproject.toml"), of(root / "tui" / "pyproject.toml")
    wrong = [f"pyproject.toml has no address called {name} in [project.urls]" for name in NAMES if name not in ours]
    if monitors != ours:
        wrong.append("tui/pyproject.toml has other [project.urls] than pyproject.toml")
    if f"<{ours.get('Security')}>" not in (root / "SECURITY.md").read_text("utf-8"):
        wrong.append("SECURITY.md does not name the address that pyproject.toml has as Security")
    for name, url in ours.items():
        host = re.match(r"https://([^/:]+)", url)
        if host is None:
            wrong.append(f"pyproject.toml: {name} is {url}, and an address that begins with https:// is expected")
        elif tag is not None and host[1].endswith(UNSET):
            wrong.append(f"pyproject.toml: {name} is {url}, a placeholder: set the real address before a release")
    return wrong
