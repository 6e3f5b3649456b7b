"""Imports that lint-imports cannot see: the compiled core, the package's own names, and ``sys.modules``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "fastckpt"
FILES = sorted(PACKAGE.rglob("*.py"))
#: Modules of the package that any stage may import; the compiled core is not a Python module.
SHARED = {"_core", "_crc64", "_paths", "_text", "_units", "distributed", "exceptions", "keep", "when"}

#: A conversion to Hugging Face's layout copies tensors from file to file, which no public call does.
COPIES = "hugging_face.py"


def imports_at_run_time(node: ast.AST, folder: tuple[str, ...]):
    """Yield a file's imports in ``folder``: ``X`` of the package, ``*`` for the package, ``X.`` of module X."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from imports_at_run_time(other, folder)
        elif isinstance(child, ast.ImportFrom):
            above = ("fastckpt", *folder)[: len(folder) + 2 - child.level] if child.level else ()
            module = ".".join((*above, *filter(None, [child.module])))
            if module.split(".")[0] == "fastckpt":
                yield from [alias.name for alias in child.names] if module == "fastckpt" else [f"{module[9:]}."]
        elif isinstance(child, ast.Import):
            yield from [f"{alias.name[9:]}." for alias in child.names if alias.name.startswith("fastckpt.")]
            yield from ["*" for alias in child.names if alias.name == "fastckpt"]
        else:
            yield from imports_at_run_time(child, folder)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_package_itself_is_imported_by_tools_and_doors_alone(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    taken = set(imports_at_run_time(tree, file.relative_to(PACKAGE).parent.parts))
    if "_tools" in file.parts:
        private = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        taken |= {name.split(".")[1] for name in private if name.startswith("fastckpt._")} - {"__version__"}
        core = {name for name in taken if name.split(".")[0] == "_core"}
        assert not core or file.name == COPIES, "the tools use the public API"
    elif "integrations" not in file.parts and file.relative_to(PACKAGE).parts not in [
        ("__init__.py",),
        ("__main__.py",),
    ]:
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        # These files import other packages, by tables of names.
        allowed = ("('ml_dtypes')", "import_module(module)") if file.name == "built_in.py" else ("('ml_dtypes')",)
        hidden = [call for call in calls if "import_module(" in call and not any(one in call for one in allowed)]
        assert not hidden, "lint-imports does not see these"
        own = {name for name in taken if "." not in name} - SHARED
        assert not own, f"import {own} from the module that defines it"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_of_ours_is_looked_up_in_sys_modules(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        # A node with such a part is a statement or expression around `sys.modules`.
        parts = [
            child for child in ast.iter_child_nodes(node) if ast.unparse(child) in ("sys.modules", "sys.modules.get")
        ]
        if parts:
            text = ast.unparse(node)
            assert "fastckpt" not in text, text
            assert "__name__" not in text, text
            assert "__package__" not in text, text
