"""The reference of the Python API: a page for each public module, with each public name that it has.

``tests/api/surface.txt`` lists the names, and a test holds it against the package. What the pages say comes from the
docstrings and signatures, by Sphinx's autodoc.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEAD = "Python API\n==========\n\nEvery public name, module by module, as its docstring describes it.\n"
#: A line of the surface: its depth, whether it is a class, its name, and what follows.
_LINE = re.compile(r"(?P<depth> *)(?P<kind>class )?(?P<name>[\w.]+)(?P<rest>.*)")


def surface() -> dict[str, dict[str, list[str]]]:
    """Modules, the names that each defines, and of each class the members."""
    found: dict[str, dict[str, list[str]]] = {}
    names: dict[str, list[str]] = {}
    for line in (ROOT / "tests" / "api" / "surface.txt").read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        assert match, line
        depth, name, rest = len(match["depth"]), match["name"], match["rest"]
        if depth == 0:
            names = found.setdefault(name, {})
        elif depth == 2 and rest != ": a module" and not rest.startswith(": as "):
            members = names.setdefault(name, [])
        elif depth == 4:
            members.append(name)
    return {module: names for module, names in found.items() if names}


def pages() -> dict[str, str]:
    """All pages, by path; the first lists the others."""
    modules = surface()
    listed = "\n".join(f"   api/{module}" for module in modules)
    found = {"api.rst": f"{_HEAD}\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"}
    for module, names in modules.items():
        parts = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
        for name, members in names.items():
            parts += [*_entry(module, name, members), ""]
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
    # Records are returned, not made: where the docstring has no arguments, the signature is no promise.
    lines = [f".. autoclass:: {module}.{name}{'' if 'Args:' in said else '()'}"]
    return lines + ([f"   :members: {', '.join(rest)}", "   :undoc-members:"] if rest else [])
