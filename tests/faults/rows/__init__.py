"""The rows of the campaign: the ``ROWS`` of each file."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.row import Row


@cache
def rows() -> dict[str, Row]:
    """Return all rows by name, in the order of the table."""
    found: list[Row] = []
    for module in pkgutil.iter_modules(__path__):
        found += importlib.import_module(f"{__name__}.{module.name}").ROWS
    return {row.name: row for row in sorted(found, key=lambda row: row.number)}
