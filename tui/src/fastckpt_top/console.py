"""Output to the standard streams and to files that others read, and the exit codes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from fastckpt_top import text

if TYPE_CHECKING:
    from pathlib import Path

OK: Final = 0
BELOW: Final = 1
USAGE: Final = 2
NOTHING: Final = 3
UNREADABLE: Final = 4


def nothing_found(words: str) -> None:
    """Print that nothing was found, and a possible reason: another project's distribution is called ``fastckpt``."""
    from importlib import metadata

    print(words, file=sys.stderr)
    found = {name: any(metadata.distributions(name=name)) for name in ("fastckpt", "fastckpt-io")}
    if found["fastckpt"]:
        install = "--force-reinstall --no-deps fastckpt-io" if found["fastckpt-io"] else "fastckpt-io"
        complain(
            "the distribution fastckpt of this environment is another project's, and saves no checkpoints: "
            f"pip uninstall fastckpt && pip install {install}"
        )


def complain(words: str) -> None:
    """Print an error to standard error: paths and the contents of files are untrusted."""
    print(f"fastckpt-top: {text.clean(words)}", file=sys.stderr)


def put(words: str) -> None:
    """Print text, even with characters that this locale does not have."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(words.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def close() -> None:
    """Close the stream: the reader is gone, and nothing can be written, even at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def replace(path: Path, words: str) -> None:
    """Replace a file atomically, so that no reader finds half of it.

    Raises:
        OSError: The file cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(words, "utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
