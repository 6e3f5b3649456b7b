"""Installations into another library, from the call that installs until the end."""

from __future__ import annotations

import functools
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType


class Installed:
    """The active installations of one kind, and the functions that are replaced while one is active."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._options: list[Any] = []
        self._replaced: set[tuple[int, str]] = set()

    @property
    def options(self) -> Any:
        """The options of the last active installation; None without one."""
        options = self._options
        return options[-1] if options else None

    def begin(self, options: Any, replaced: Iterable[tuple[Any, str, Callable[..., Any]]] = ()) -> Installation:
        """Begin an installation, whose ``options`` apply from now on; for ``replaced`` see :meth:`replace`."""
        for owner, name, ours in replaced:
            self.replace(owner, name, ours)
        with self._lock:
            made = Installation(self, options)
            self._options.append(options)
        return made

    def end(self, options: Any) -> None:
        """End the installation with this options object; a second call does nothing."""
        with self._lock:
            for at, known in enumerate(self._options):
                if known is options:
                    del self._options[at]
                    break

    def replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Make ``owner.name`` call ``ours(options, theirs, *args)`` while an installation is active.

        ``theirs`` is the original function. The replacement is permanent, and passes calls on when nothing is
        installed: other code may hold a reference to it.
        """
        with self._lock:
            if (id(owner), name) in self._replaced:
                return
            self._replaced.add((id(owner), name))
            theirs = getattr(owner, name)

            @functools.wraps(theirs)
            def call(*args: Any, **kwargs: Any) -> Any:
                options = self.options
                return theirs(*args, **kwargs) if options is None else ours(options, theirs, *args, **kwargs)

            is_static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(call) if is_static else call)


class Installation:
    """The result of :func:`fastckpt.dcp.install` and the like: a context manager that ends the installation."""

    def __init__(self, installed: Installed, options: Any) -> None:
        self._installed = installed
        self._options = options

    def uninstall(self) -> None:
        """End this installation; a second call does nothing."""
        self._installed.end(self._options)

    def __enter__(self) -> Installation:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()
