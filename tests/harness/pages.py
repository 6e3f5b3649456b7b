"""The programs in the documents."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]


def text(page: str) -> str:
    """A page, whose path is relative to the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def python(page: str) -> list[str]:
    """The blocks of Python on a page."""
    found = re.findall(r"^ *```python\n(.*?)^ *```$", text(page), re.MULTILINE | re.DOTALL)
    return [dedent(block) for block in found]
