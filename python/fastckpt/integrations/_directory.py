"""The checkpoints in a directory that a framework keeps: where a run goes on from, and which ones go."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._portable.limits import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOG = logging.getLogger("fastckpt")


def is_ours(path: Any) -> bool:
    """Whether this is the path of a checkpoint that fastckpt wrote."""
    return isinstance(path, (str, os.PathLike)) and Path(path, MANIFEST).is_file()


def newest_first(files: Iterable[Path]) -> list[str]:
    """The directories of these files, by the number at the end of their names."""
    steps = {int(found[0]): str(one.parent) for one in files if (found := re.search(r"\d+$", one.parent.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def newest_that_verifies(paths: Iterable[str]) -> str | None:
    """The first of these checkpoints that is not damaged, as far as fastckpt wrote them."""
    for path in paths:
        if not is_ours(path) or fastckpt.verify(path).ok:
            return path
        LOG.warning("fastckpt: %s is damaged, and the checkpoint before it is taken: fastckpt verify tells more", path)
    return None


def keep(limit: int | None, protected: set[str | None], paths: Sequence[str]) -> None:
    """Of these checkpoints, the oldest first, remove those beyond a number, but none that is protected.

    Each goes at once, so that a kill leaves none that looks newer than it is.
    """
    others = [path for path in paths if path not in protected]
    beyond = 0 if limit is None or limit <= 0 else max(0, len(paths) - limit)
    for path in others[:beyond]:
        if is_ours(path):
            fastckpt.remove(path, force=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
