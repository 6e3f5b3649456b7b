"""Serves the requests of the protocol from a store of torch's: TCPStore, FileStore, HashStore, PrefixStore over them.

A client of a TCPStore whose server is stopped waits without end, whatever its timeout. So every call runs in a separate
thread (``_Line``), and its caller waits for a bounded time. A thread that hangs is abandoned: it ends when the server
answers or exits. If the store can be cloned, each line is a clone with its own connection, so that our waits do not
block other users of the store, nor their waits ours.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from fastckpt._ranks.requests import Add, Call, Forget, Get, Now, Put, Remove, Request, Swap, UnreachableError, Wait

#: The most seconds to renew a connection, and to end a wait that is no longer needed.
_CONNECTED, _FORGOTTEN = 5.0, 1.0
#: Seconds between two polls of a store whose clients must not block in it, at first and at most.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05


#: A value that no key has. A compare-and-set with this value returns it if the key does not exist.
_NO_VALUE = b"\0none"


class _Task:
    """One call, and its result."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.ended = threading.Event()
        self.forgotten = False  # a wait that was ended, whether or not its keys exist
        self.result: Any = None
        self.error: BaseException | None = None


class _Line:
    """A thread with a client of the store, which makes one call after another.

    Args:
        connect: makes the client; it may hang as well.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.connected = threading.Event()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(connect,), name="fastckpt-store", daemon=True).start()

    def start(self, function: Callable[[Any], Any]) -> _Task:
        task = _Task(function)
        self._tasks.put(task)
        return task

    def end(self) -> None:
        self._tasks.put(None)

    def _run(self, connect: Callable[[], Any]) -> None:
        client: Any = None
        failed: BaseException | None = None
        try:
            client = connect()
        except Exception as error:  # noqa: BLE001 - it is the callers'
            failed = error
        self.connected.set()
        while (task := self._tasks.get()) is not None:
            task.error = failed
            try:
                task.result = None if failed else task.function(client)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                task.error = error
            task.ended.set()
            del task


class Transport:
    """The store of a process group, as the protocol sees it. Any thread may call its methods.

    Args:
        store: a ``torch.distributed.Store``.
    """

    def __init__(self, store: Any) -> None:
        root = store
        while hasattr(root, "underlying_store"):
            root = root.underlying_store
        host = getattr(root, "host", None)
        self._name = (
            f"the store of the process group at {host}:{root.port}"
            if host
            else (f"the store of the process group ({type(root).__name__})")
        )
        self._store = store
        #: Whether this is a client of a server: its connections then block in a wait instead of polling.
        self._remote = host is not None and hasattr(store, "clone")
        self._address = (host, root.port) if self._remote else None
        # Reentrant for signal handlers.
        self._lock = threading.RLock()
        # Connections take time, so they are started at once.
        self._line: _Line | None = _Line(self._connect)
        self._waiter: _Line | None = _Line(self._connect) if self._remote else None
        self._waits: tuple[frozenset[str], _Task] | None = None

    @property
    def blocks(self) -> bool:
        """Whether a wait blocks at a server, and costs nothing meanwhile."""
        return self._remote

    def serve(self, request: Request, limit: float) -> Any:
        """Answer a request, whose calls may take ``limit`` seconds each.

        Raises:
            UnreachableError: the store does not answer.
        """
        if isinstance(request, Now):
            return time.monotonic()
        if isinstance(request, Call):
            return request.function(request.value)
        if isinstance(request, Wait):
            return self._wait(request.keys, request.seconds, limit)
        if isinstance(request, Forget):
            return self._forget(limit)
        return self._call(lambda client: _answer(client, request), limit, again=not isinstance(request, Add))

    def close(self) -> None:
        """End the threads, except those that hang."""
        with self._lock:
            for line in (self._line, self._waiter):
                if line is not None:
                    line.end()
            self._line = self._waiter = self._waits = None

    def _connect(self) -> Any:
        return self._store.clone() if self._remote else self._store

    def _connect_again(self) -> Any:
        self._look_for_server()
        return self._connect()

    def _look_for_server(self) -> None:
        """Raise OSError if the server is gone: torch retries for minutes to reach it.

        Call this only in doubt: for each connection, the server looks up the host name of the client, and answers no
        other client meanwhile.
        """
        if self._address is not None:
            socket.create_connection(self._address, _CONNECTED).close()

    def _call(self, function: Callable[[Any], Any], limit: float, *, again: bool = True) -> Any:
        """Make a call; a broken connection is replaced once, if the call may be repeated."""
        while True:
            with self._lock:
                doubt = self._line is None
                line = self._line = self._line or _Line(self._connect_again)
            task = line.start(function)
            ended = self._ends(task, line, limit) if doubt else task.ended.wait(limit)
            if ended and task.error is None:
                return task.result
            with self._lock:
                if self._line is line:
                    self._line = None
            line.end()
            if not ended:
                raise UnreachableError(f"{self._name} has not answered for {limit:.1f} s{_CAUSE}")
            if not (again and self._remote and isinstance(task.error, (RuntimeError, OSError))):
                raise UnreachableError(
                    f"{self._name} does not answer ({_first_line(task.error)}){_CAUSE}"
                ) from task.error
            again = False

    def _ends(self, task: _Task, line: _Line, limit: float) -> bool:
        """Whether the first call of a line in doubt ends in time.

        A killed server may still accept a connection after it has reset the others, and exit before it answers.
        """
        ends = time.monotonic() + limit
        while not line.connected.wait(min(_CONNECTED, max(ends - time.monotonic(), 0))):
            if time.monotonic() >= ends:
                return False
            try:
                self._look_for_server()
            except OSError as error:
                task.error = error
                return True
        return task.ended.wait(max(ends - time.monotonic(), 0))

    def _wait(self, keys: tuple[str, ...], seconds: float, limit: float) -> bool:
        ends = time.monotonic() + seconds
        if self._remote and (task := self._wait_there(keys, limit)) is not None:
            if not task.ended.wait(seconds):
                return False
            with self._lock:
                self._waits = None
                if task.error is not None and self._waiter is not None:
                    self._waiter.end()
                    self._waiter = None
            if task.error is None and not task.forgotten:
                return True
        pause = _FIRST_LOOK
        while not self._call(lambda client: client.check(list(keys)), limit):
            left = ends - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_LOOK)
        return True

    def _forget(self, limit: float) -> None:
        """End a wait at the server by setting the key that it waits for.

        Otherwise the wait would end with the store, perhaps in interpreter shutdown, which kills its thread uncleanly.
        """
        with self._lock:
            waits, self._waits = self._waits, None
        if waits is None or waits[1].ended.is_set():
            return
        keys, task = waits
        task.forgotten = True

        def ring(client: Any) -> list[str]:
            missing = [key for key in keys if not client.check([key])]
            for key in missing:
                client.set(key, b"")
            return missing

        missing = self._call(ring, limit)
        task.ended.wait(min(limit, _FORGOTTEN))
        self.serve(Remove(tuple(missing)), limit)

    def _wait_there(self, keys: tuple[str, ...], limit: float) -> _Task | None:
        """Return a wait at the server for these keys, or for these and more; it replaces a wait for others."""
        with self._lock:
            if self._waits is not None:
                awaited, task = self._waits
                if awaited.issuperset(keys):
                    return task
                if not task.ended.is_set():
                    # The old wait blocks until its timeout, and is no longer needed.
                    if self._waiter is not None:
                        self._waiter.end()
                    self._waiter = _Line(self._connect)
            self._waiter = self._waiter or _Line(self._connect_again)
            longest = timedelta(seconds=2 * limit + 60)
            task = self._waiter.start(lambda client: client.wait(list(keys), longest))
            self._waits = frozenset(keys), task
            return task


_CAUSE = ": its host, usually rank 0 or the launcher, is gone or stopped"


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _answer(client: Any, request: Request) -> Any:
    """Make the call of a request."""
    if isinstance(request, Put):
        if len(request.values) > 1 and client.has_extended_api():
            client.multi_set(list(request.values), list(request.values.values()))
            return None
        for key, value in request.values.items():
            client.set(key, value)
        return None
    if isinstance(request, Get):
        # Getting a key waits for it, and an existing key may have been removed since the check. A compare-and-set does
        # not wait.
        values = [client.compare_set(key, _NO_VALUE, _NO_VALUE) for key in request.keys]
        return [None if value == _NO_VALUE else value for value in values]
    if isinstance(request, Add):
        return client.add(request.key, request.amount)
    if isinstance(request, Swap):
        return client.compare_set(request.key, request.expected, request.value)
    if isinstance(request, Remove):
        for key in request.keys:
            with contextlib.suppress(NotImplementedError):
                client.delete_key(key)
        return None
    raise TypeError(request)
