"""Sphinx's configuration."""

from __future__ import annotations

import importlib
import re
import warnings
from typing import TYPE_CHECKING, Any

from sphinx.addnodes import pending_xref, pending_xref_condition

import fastckpt
from pages import api

if TYPE_CHECKING:
    from docutils import nodes

warnings.simplefilter("ignore")  # of the frameworks that autodoc imports

project = "fastckpt"
copyright = "the authors of fastckpt, Apache-2.0"
version = release = fastckpt.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# A role without a target is a warning, and scripts/docs makes warnings errors.
nitpicky = True

myst_heading_anchors = 4
highlight_language = "text"
default_role = "code"
smartquotes = False  # they merge the two dashes of an option

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

# Search also works from a disk, where a browser refuses to fetch pages for extracts.
html_show_search_summary = False
html_theme = "furo"
html_title = f"fastckpt {release}"
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_static_path, html_css_files = ["static"], ["site.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

#: A page of the repository that a docstring names.
_PAGE = re.compile(r"\bdocs/((?:\w+/)*[\w-]+)\.md\b")


def _link_pages(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def _public() -> dict[str, str]:
    """The full public name of each class, by its place of definition, and by its bare name if that is unique."""
    found: dict[str, str] = {}
    several: set[str] = set()
    for module, names in api.surface().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, type):
                several |= {name} & found.keys()
                found |= dict.fromkeys((f"{module}.{name}", f"{value.__module__}.{name}", name), f"{module}.{name}")
    return {name: full for name, full in found.items() if name not in several}


def _link_types(app: Any, doctree: nodes.document) -> None:
    """Link public types from signatures, lists of errors and docstrings, by any of their names.

    Other types in signatures are text. Other targets of roles stay unchanged, and are checked.
    """
    for node in [*doctree.findall(pending_xref)]:
        if node["refdomain"] == "py":
            full = app.fastckpt_names.get(node["reftarget"].lstrip("."))
            if full is not None:
                node["reftarget"], node["refspecific"] = full, False
            elif "refdoc" not in node:  # no role
                node.replace_self([text for one in node.children for text in _shown(one)])


def _shown(node: nodes.Node) -> list[nodes.Node]:
    """The short form of a name that has two forms and that Sphinx would take for a link."""
    if isinstance(node, pending_xref_condition):
        return [] if node["condition"] == "*" else list(node.children)
    return [node]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.fastckpt_names = _public()
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("doctree-read", _link_types)
