"""Another project's distribution is called ``fastckpt`` and installs a module of the same name (docs/install.md).

pip installs both into one directory, where the later one silently overwrites files of the earlier one.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

#: The command that repairs an installation with both distributions. Without ``--no-deps``, pip would reinstall numpy,
#: too.
REMEDY = "pip uninstall fastckpt && pip install --force-reinstall --no-deps fastckpt-io"

# The names that pip, setuptools and distutils give to the metadata of an installed distribution.
_about = re.compile(r"fastckpt(?:-(\d[\w.+!]*)(?:-py[\d.]+)?)?\.(?:dist|egg)-info", re.IGNORECASE).fullmatch


def warn_of_namesake() -> None:
    """Warn if the other project's distribution is installed in this package's directory.

    Only the directory of this package is examined: elsewhere the other one overwrites nothing, and the order of
    ``sys.path`` decides. ``importlib.metadata`` would find more, but its import takes nearly as long as that of
    fastckpt (25 ms of CPU, against 33); the listing takes 0.4 ms in a directory of 230 names.

    Warns:
        RuntimeWarning: the other distribution is there.
    """
    package = Path(__file__).parent
    other = _other_in(package.parent)
    if other is not None:
        warnings.warn(
            f"{other} and fastckpt-io are both installed into {package} and overwrite each other's files there; "
            f"{other} is another project's. To keep fastckpt-io: {REMEDY}",
            RuntimeWarning,
            stacklevel=4,  # this function, fastckpt/_api, fastckpt, and its importer
        )


def check_own(module: ModuleType) -> None:
    """Raise ImportError, with the remedy, if the module ``fastckpt`` given as ``module`` is not this package's."""
    if not hasattr(module, "save"):
        package = Path(__file__).parent
        other = _other_in(package.parent)
        by = (
            f"{other}, another project's, has overwritten"
            if other
            else "another distribution has overwritten or removed"
        )
        raise ImportError(f"cannot import fastckpt: {by} {package / '__init__.py'}; {REMEDY}")


def _other_in(directory: Path) -> str | None:
    """Return name and version of the other distribution if it has files in ``directory``/fastckpt."""
    try:
        names = os.listdir(directory)  # noqa: PTH208 - many names, of which one or none becomes a path
    except OSError:
        # The directory is in an archive, or cannot be read.
        return None
    for name in names:
        about = _about(name)
        if about is not None and _has_files(directory / name / "RECORD"):
            return f"fastckpt {about[1]}" if about[1] else "the distribution fastckpt"
    return None


def _has_files(record: Path) -> bool:
    """Whether the list of files ``record`` belongs to another distribution that has a package ``fastckpt``.

    Distributions of Debian, and old ones, have no list of files: there the name decides.
    """
    try:
        with record.open(encoding="utf-8", errors="replace") as lines:
            files = [line for line in lines if line.startswith("fastckpt/")]
    except OSError:
        return True
    return bool(files) and not any(line.startswith("fastckpt/_namesake.py,") for line in files)
