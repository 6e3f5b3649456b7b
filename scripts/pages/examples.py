"""A page with all programs of examples/."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEAD = """# Examples

For those who want a program to begin with: each is complete, and a test runs it. Copy one, and change the model.
"""


def pages() -> dict[str, str]:
    """The page, by its path."""
    folder = ROOT / "examples"
    found = [_HEAD, *(_program(file) for file in (*sorted(folder.glob("*.py")), *sorted(folder.glob("doors/*.py"))))]
    return {"examples.md": "\n".join(found)}


def _program(file: Path) -> str:
    """A section: the name, what its docstring says, the program."""
    text = file.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(text)) or ""
    return f"## {file.name}\n\n{about}\n\n```python\n{text}```\n"
