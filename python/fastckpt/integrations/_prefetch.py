"""Tensors of a safetensors file that threads read in the background."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from concurrent.futures import Future, as_completed, wait
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - the framework of these tensors
from safetensors import SafetensorError

from fastckpt.exceptions import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from io import FileIO
    from types import TracebackType


class Loader:
    """What :meth:`safe_open.prefetch` returns: it gives each tensor once, by ``take`` or by iteration.

    Threads read the tensors in the order of the file, each into memory of its own. All that nobody has taken stays in
    memory until ``close``. A context manager.
    """

    def __init__(self, names: list[str], files: list[FileIO], read: Callable[[FileIO, str], torch.Tensor]) -> None:
        self._process = os.getpid()
        self._names = names
        self._futures: dict[str, Future[None]] = {name: Future() for name in names}
        # Not in the futures: whoever waits for several would keep what was taken.
        self._landed: dict[str, torch.Tensor] = {}
        # They have no reference to this object: they end when it goes.
        self._todo = deque(self._futures.items())
        given = [(file, self._todo, self._landed, read) for file in files]
        self._threads = [threading.Thread(target=_work, args=one, name="fastckpt-prefetch") for one in given]
        for thread in self._threads:
            thread.start()

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return [*self._names]

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> torch.Tensor:
        """The tensor, once it is there. Raises what has kept it from being read; SafetensorError if it was taken."""
        self._check_process()
        future = self._futures.get(name)
        if future is not None:
            wait([future])
            if self._futures.pop(name, None) is not None:  # or another thread has taken it meanwhile
                return self._outcome(name, future)
        raise SafetensorError(f"prefetch: {name!r} is not in the prefetch plan, or was already delivered")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_process()
        waiting = {future: name for name, future in [*self._futures.items()]}
        for name in map(waiting.pop, as_completed([*waiting])):
            future = self._futures.pop(name, None)
            if future is not None:
                yield name, self._outcome(name, future)

    def _outcome(self, name: str, future: Future[None]) -> torch.Tensor:
        if not future.cancelled():
            future.result()
            landed = self._landed.pop(name, None)
            if landed is not None:
                return landed
        raise SafetensorError(f"prefetch: {name!r} is not there: the loader was closed, or the program ends")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SafetensorError("prefetch: the loader belongs to the process that this one was forked from")

    def close(self) -> None:
        """Stop reading, and release what nobody has taken. Once more does nothing."""
        if os.getpid() == self._process:
            for future in [*self._futures.values()]:
                future.cancel()
            for thread in self._threads:
                thread.join()
            self._landed.clear()

    def __del__(self) -> None:
        self._todo.clear()

    def __enter__(self) -> Loader:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work(
    file: FileIO,
    todo: deque[tuple[str, Future[None]]],
    landed: dict[str, torch.Tensor],
    read: Callable[[FileIO, str], torch.Tensor],
) -> None:
    """Read what there is to do; where that was given up, tell those who wait for it."""
    with file:
        while True:
            try:
                name, future = todo.popleft()
            except IndexError:
                return
            # The interpreter waits for this thread before it ends.
            if not threading.main_thread().is_alive():
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    landed[name] = read(file, name)
                    future.set_result(None)
                except BaseException as error:  # noqa: BLE001 - it is raised where the tensor is asked for
                    future.set_exception(error)


def is_cuda(device: Any) -> bool:
    """Whether tensors go to a device of CUDA."""
    return torch.device(device).type == "cuda"


def begin(
    lazy: Any,
    plan: Mapping[str, slice | None],
    opened: Callable[[], FileIO],
    check: Callable[[list[str]], None] | None,
    device: Any,
    threads: int,
) -> Loader:
    """Begin to read.

    Args:
        lazy: the file as safetensors opens it: its tensors are pages of the file, and tell dtypes and shapes.
        plan: the names, each with the rows to read; None for all.
        opened: opens that same file.
        check: raises an error if a tensor is damaged; None where nobody knows.
        device: where tensors go.
        threads: the most threads.
    """
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"prefetch: threads must be an int of at least 1, not {threads!r}")
    # By name: what the part looks like, and where it begins in the tensor.
    parts: dict[str, tuple[torch.Tensor, int]] = {}
    for name in dict.fromkeys([*(name for name in lazy.offset_keys() if name in plan), *plan]):
        whole = lazy.get_tensor(name)
        part = _rows(name, whole, plan[name])
        parts[name] = part, (part.storage_offset() - whole.storage_offset()) * part.element_size()
    files = [opened() for _ in range(min(threads, len(parts)))]
    starts = _starts(files[0]) if files else {}

    def read(file: FileIO, name: str) -> torch.Tensor:
        if check is not None:
            check([name])
        part, begin = parts[name]
        made = torch.empty_like(part)
        memory: Any = memoryview(made.reshape(-1).view(torch.uint8).numpy().data)
        file.seek(starts[name] + begin)
        while memory:
            got = file.readinto(memory)
            if not got:
                raise CorruptCheckpointError(f"prefetch: {file.name!r} ends within {name!r}: it was truncated")
            memory = memory[got:]
        return made.to(device)

    return Loader([*parts], files, read)


def _rows(name: str, whole: torch.Tensor, rows: slice | None) -> torch.Tensor:
    if rows is None:
        return whole
    if not whole.ndim:
        raise SafetensorError(f"prefetch: {name!r} is a 0-d tensor, which has no rows {rows!r}")
    if isinstance(rows, slice) and rows.step in (None, 1):
        # Python takes fewer rows where there are fewer; a plan that goes beyond is wrong.
        ends = [end for end in (rows.start, rows.stop) if end is not None]
        if all(hasattr(end, "__index__") and abs(end) <= len(whole) for end in ends):
            return whole[rows]
    raise SafetensorError(
        f"prefetch: the plan has {rows!r} for {name!r}: give None or a slice of step 1, not out of range of its "
        f"{len(whole)} rows"
    )


def _starts(file: FileIO) -> dict[str, int]:
    """Where the bytes of each tensor begin; safetensors has read this header before."""
    data = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(data - 8))
    return {name: data + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
