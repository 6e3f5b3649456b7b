"""Where a checkpoint is, on the command line."""

from __future__ import annotations

from pathlib import Path

from fastckpt._paths import is_url


def place(text: str) -> Path | str:
    """A path; a URL as it is, since a Path would fold its slashes."""
    return text if is_url(text) else Path(text)
