"""Settings that the screen keeps from one start to the next: a small JSON file in the user's configuration directory.

The view is not saved: the screen always starts with the operation, its sentence and the ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from platformdirs import user_config_path

from fastckpt_top import console
from fastckpt_top.views.graph import ZOOMS
from fastckpt_top.views.state import SORTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LARGEST: Final = 1 << 16
"""The most bytes of the file: a larger one is not this program's."""
_VALID: Final[dict[str, Callable[[Any], bool]]] = {
    "theme": lambda value: isinstance(value, str),
    "sort": lambda value: value in SORTS,
    "zoom": lambda value: value in ZOOMS,
}


def path() -> Path:
    """The file: `fastckpt/top.json` in XDG_CONFIG_HOME, which is ~/.config if it is unset."""
    return user_config_path("fastckpt") / "top.json"


def load(file: Path) -> tuple[dict[str, Any], str]:
    """Read the settings.

    Args:
        file: The file.

    Returns:
        The known keys with valid values, and the problems with the rest; a missing file is not a problem.
    """
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_LARGEST).decode())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot read {file}: {error.strerror or error}"
    except (ValueError, RecursionError):
        return {}, f"{file} is ignored: it is not JSON"
    if not isinstance(found, dict):
        return {}, f"{file} is ignored: it holds no JSON object"
    known = {key: found[key] for key, valid in _VALID.items() if key in found and valid(found[key])}
    wrong = [key for key in _VALID if key in found and key not in known]
    return known, f"{file}: {', '.join(wrong)}: value ignored" if wrong else ""


def remember(file: Path, key: str, value: object) -> str:
    """Change one value. The file is replaced atomically; its other contents stay, unless it cannot be read.

    Args:
        file: The file.
        key: A key that `load` accepts.
        value: Its value.

    Returns:
        Why the file could not be written; empty if it was written.
    """
    values = load(file)[0] | {key: value}
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        console.replace(file, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        return f"cannot write {file}: {error.strerror or error}"
    return ""
