"""Distinguishes URLs of object stores from paths, and checks them."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from fastckpt._paths import AnyPath, is_url, text_of

#: The schemes of the URLs of each store. ``file`` is a path.
SCHEMES = ("s3", "gs", "az", "memory")

# A pathlib.Path folds two slashes into one.
_parts = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL).fullmatch
_LOCAL = "localhost/"


def place_of(operation: str, path: AnyPath) -> str:
    """``path`` as an absolute path of this machine, or as the normalised URL of an object store.

    The result for a URL has its scheme in lower case, two slashes, and none at the end; for ``file://`` it is a path.

    Raises:
        TypeError: ``path`` is neither str, bytes nor os.PathLike.
        ValueError: ``path`` is empty, or a URL that names no store or an unknown store.
    """
    text = text_of(operation, path)
    if not is_url(text):
        return os.path.abspath(text)  # noqa: PTH100 - resolve() would follow symbolic links
    found = _parts(text)
    assert found is not None  # noqa: S101 - is_url has matched it
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        # Only a host may come between the second and the third slash, and only this machine is accepted.
        if text[len("file:") :].startswith("//") and not text[len("file:") :].startswith("///"):
            if not rest.startswith(_LOCAL):
                raise ValueError(f"{operation}: {text!r} names a path on another machine: give file:///PATH")
            rest = rest[len(_LOCAL) :]
        return os.path.abspath("/" + unquote(rest))  # noqa: PTH100
    if scheme not in SCHEMES:
        known = ", ".join(f"{one}://" for one in (*SCHEMES, "file"))
        raise ValueError(
            f"{operation}: {text!r} is not a URL of a store that fastckpt supports: give one of {known} (if this is a "
            "relative path, give the absolute one)"
        )
    rest = rest.rstrip("/")
    segments = rest.split("/")
    if "@" in segments[0]:
        raise ValueError(
            f"{operation}: a {scheme}:// URL must not hold credentials: give them in the environment (docs/stores.md)"
        )
    if not rest or not all(segments) or {".", ".."} & set(segments):
        raise ValueError(
            f"{operation}: {text!r} does not name a place in a store: give {scheme}://BUCKET/NAME, without empty "
            "parts, `.` and `..`"
        )
    return f"{scheme}://{rest}"
