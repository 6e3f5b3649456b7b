"""Functions for background saves: wait for their end, free their memory, guard lazy copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# A signal handler may call drain first, while the program below imports save_async: import nothing else here.
from fastckpt._api.in_flight import drain

if TYPE_CHECKING:
    from fastckpt._api.host_memory import release_buffers
    from fastckpt._background.guard import Guard, guard

__all__ = ["Guard", "drain", "guard", "release_buffers"]


def __getattr__(name: str) -> Any:
    if name == "release_buffers":
        from fastckpt._api.host_memory import release_buffers  # noqa: PLC0415 - see above

        return release_buffers
    if name in __all__:
        from fastckpt._background import guard  # noqa: PLC0415 - see above

        return getattr(guard, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
