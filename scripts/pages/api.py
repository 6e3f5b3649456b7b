"""The reference of the Python API: a page for each public module, with each public name that it has.

``tests/api/surface.txt`` lists the names, and a test compares the list with the package. Sphinx's autodoc takes the
text of the pages from docstrings and signatures.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEAD = """Python API
==========

For those who write code with fastckpt: every public name, module by module, as its docstring describes it.
"""
#: A line of the surface: a module, a name that it defines, or a member of a class.
_LINE = re.compile(
    r"(?P<module>[\w.]+):|  (?:class )?(?P<name>\w+)(?!: )(?:\W.*)?|    (?P<member>\w+).*|  \w+: (?:a module|as .*)"
)


def surface() -> dict[str, dict[str, list[str]]]:
    """Modules, the names that each defines, and of each class the members."""
    found: dict[str, dict[str, list[str]]] = {}
    names: dict[str, list[str]] = {}
    members: list[str] = []
    for line in (ROOT / "tests" / "api" / "surface.txt").read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"tests/api/surface.txt: {line!r}")
        if match["module"]:
            names = found.setdefault(match["module"], {})
        elif match["name"]:
            members = names.setdefault(match["name"], [])
        elif match["member"]:
            members.append(match["member"])
    return found


def pages() -> dict[str, str]:
    """All pages, by path; the first lists the others."""
    modules = surface()
    listed = "\n".join(f"   api/{module}" for module in modules)
    found = {"api.rst": f"{_HEAD}\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"}
    for module, names in modules.items():
        parts = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
        for name in sorted(names, key=str.swapcase):  # functions first
            parts += [*_entry(module, name, names[name]), ""]
        found[f"api/{module}.rst"] = "\n".join(parts)
    return found


def _entry(module: str, name: str, members: list[str]) -> list[str]:
    """The directive for a name."""
    value = getattr(importlib.import_module(module), name)
    if not inspect.isclass(value):
        return [f".. autofunction:: {module}.{name}"]
    # A section of the docstring describes the fields.
    said = inspect.getdoc(value) or ""
    rest = [member for member in members if f"\n    {member}: " not in said]
    # Records are returned, not made: where the docstring has no arguments, the signature is not a promise.
    lines = [f".. autoclass:: {module}.{name}{'' if 'Args:' in said else '()'}"]
    return lines + ([f"   :members: {', '.join(rest)}", "   :undoc-members:"] if rest else [])
