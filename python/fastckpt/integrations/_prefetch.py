"""Tensors of a safetensors file that threads read in the background."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - the framework of these tensors
from safetensors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

#: More threads gain nothing.
_MOST_THREADS = 64


class Loader:
    """What :meth:`safe_open.prefetch` returns: it gives each tensor once, by ``take`` or by iteration.

    Threads read the tensors in the order of the file, each into memory of its own. All that nobody has taken stays in
    memory until ``close``. A context manager.
    """

    def __init__(self, names: list[str], read: Callable[[str], torch.Tensor], threads: int) -> None:
        self._process = os.getpid()
        self._names = names
        self._closed = False
        self._pool = ThreadPoolExecutor(min(threads, len(names), _MOST_THREADS) or 1, "fastckpt-prefetch")
        self._futures = {name: self._pool.submit(read, name) for name in names}

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
                return future.result()
        self._check_open()
        raise SafetensorError(f"prefetch: {name!r} is not in the prefetch plan, or was already delivered")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = {future: name for name, future in [*self._futures.items()]}
        self._check_process()
        for future in as_completed([*names]):
            self._check_open()
            name = names.pop(future)
            if self._futures.pop(name, None) is not None:
                yield name, future.result()
                self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SafetensorError("prefetch: the loader belongs to the process that this one was forked from")

    def _check_open(self) -> None:
        if self._closed:
            raise SafetensorError("prefetch: the loader was closed")

    def close(self) -> None:
        """Stop reading, and release what nobody has taken. Once more does nothing."""
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        futures = [*self._futures.values()]
        self._futures.clear()
        for future in futures:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # whoever waits for several hears of it

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Loader:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_cuda(device: Any) -> bool:
    """Whether tensors go to a device of CUDA, as safetensors takes a number."""
    return isinstance(device, int) or torch.device(device).type == "cuda"


def begin(
    lazy: Any,
    plan: Mapping[str, slice | None],
    check: Callable[[list[str]], None] | None,
    device: Any,
    threads: int,
) -> Loader:
    """Begin to read.

    Args:
        lazy: the file as safetensors opens it for torch: its tensors are pages of the file.
        plan: the names, each with the rows to read; None for all.
        check: raises an error if a tensor is damaged; None where nobody knows.
        device: where tensors go.
        threads: the most threads.
    """
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"prefetch: threads must be an int of at least 1, not {threads!r}")
    for name, rows in plan.items():
        shape = lazy.get_slice(name).get_shape()  # or there is no such tensor
        if rows is None:
            continue
        bounds = [end for end in (rows.start, rows.stop) if end is not None] if isinstance(rows, slice) else [len]
        fits = all(hasattr(end, "__index__") and shape and abs(end) <= shape[0] for end in bounds)
        if not fits or not shape or rows.step not in (None, 1):
            raise SafetensorError(
                f"prefetch: the plan has {rows!r} for {name!r} of the shape {shape}: give None, or a slice of step 1 "
                "that is not out of range of its rows"
            )

    def read(name: str) -> torch.Tensor:
        if check is not None:
            check([name])
        whole: torch.Tensor = lazy.get_tensor(name)
        rows = plan[name]
        return (whole if rows is None else whole[rows]).clone(memory_format=torch.contiguous_format).to(device)

    return Loader([name for name in lazy.offset_keys() if name in plan], read, threads)
