"""GPUDirect Storage: bytes go between a device's memory and files without passing through host memory.

torch registers files with NVIDIA's cuFile library, which it brings along. Its own calls that move bytes hold the GIL
meanwhile, and do not look at how many were moved. So the library that torch has loaded is called here.

cuFile knows no streams. Before it reads or writes device memory, the host waits for what the caller's stream was asked
for; and its calls return when the bytes have moved. Checksums are made by the device, in a stream of our own.

This file does not import torch: :mod:`.torch` hands it over.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from . import device as _device
from . import device_sums as _sums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from .memory import Mover

    #: Tensor or request, its first byte, the file, the first byte there, and how many.
    Stretch = tuple[int, int, str, int, int]

#: Bytes of a tensor that is worth a look.
_LEAST = 64 << 10
#: Files that are kept open.
_MOST_FILES = 8
_LIBRARY = "libcufile.so.0"
#: cuFile's own errors, but for those of the system.
_SYSTEM = -1


class File(Protocol):
    """A file that bytes of a device go to or come from. Any thread may call it, several at the same time."""

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Write device memory to the file; OSError when not all of it could be."""

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Read the file to device memory; OSError when not all of it could be."""


class CuFile:
    """A file that is registered with cuFile, until nothing refers to it any more.

    Args:
        torch: the module.
        path: the file.
        write: whether to write it; else it is read.

    Raises:
        OSError: its file system knows no direct I/O, for example.
        RuntimeError: cuFile refused it.
    """

    def __init__(self, torch: ModuleType, path: str, *, write: bool) -> None:
        flags = os.O_RDWR if write else os.O_RDONLY
        _open(path, flags)
        self._file = torch.cuda.gds.GdsFile(path, flags)
        library = _library()
        self._calls = library.cuFileWrite, library.cuFileRead

    @staticmethod
    def missing(torch: ModuleType) -> str | None:
        """Why there is none here, or None."""
        if torch.version.cuda is None:
            return "this torch was built without CUDA"
        if not hasattr(getattr(torch.cuda, "gds", None), "GdsFile"):
            return f"torch {torch.__version__} has no torch.cuda.gds.GdsFile, which came with 2.7"
        try:
            _library()
        except OSError:
            return f"this torch was built without cuFile ({_LIBRARY})"
        return None

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """See :class:`File`."""
        self._move("write", self._calls[0], address, nbytes, offset)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """See :class:`File`."""
        self._move("read", self._calls[1], address, nbytes, offset)

    def _move(self, verb: str, call: Callable[..., int], address: int, nbytes: int, offset: int) -> None:
        done = 0
        while done < nbytes:
            ctypes.set_errno(0)
            moved = call(self._file.handle, address, nbytes - done, offset + done, done)
            if moved <= 0:
                number = ctypes.get_errno()
                why = os.strerror(number) if moved == _SYSTEM else f"cuFile error {-moved}" if moved else "end of file"
                raise OSError(number, f"cuFile cannot {verb} {nbytes - done} bytes at {offset + done}: {why}")
            done += moved


def _open(path: str, flags: int) -> None:
    """OSError where a file cannot be opened: a GdsFile would complain once more when it is collected."""
    os.close(os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW))


def _library() -> Any:
    """What torch has loaded; OSError where it has not."""
    library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0), use_errno=True)
    for function in (library.cuFileRead, library.cuFileWrite):
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64]
    return library


#: By kind of device. Asking cuFile for a file where there is no such device has been seen to hang.
KINDS: dict[str, Any] = {"cuda": CuFile}


class Direct:
    """Moves stretches of contiguous tensors between their device and files. To be made in the caller's thread.

    Args:
        operation: the name of the operation, for errors.
        movers: by number of tensor or request.
        write: whether the tensors are saved; else they are loaded.

    Attributes:
        indices: the numbers of the tensors that it can move.
        reason: why it cannot move others, or None.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover], *, write: bool) -> None:
        self._write = write
        self._movers: dict[int, Any] = {}
        self._links: dict[Any, tuple[_device.Link, Any]] = {}
        self._files: OrderedDict[str, File] = OrderedDict()
        self._lock = Lock()
        self.reason: str | None = None
        kind = _device.Download if write else _device.Upload
        on_device = {index: mover for index, mover in movers.items() if isinstance(mover, kind)}
        if not on_device:
            self.reason = "no tensor is on a device, or all are converted on the way"
        reasons: dict[Any, str | None] = {}
        for index, mover in on_device.items():
            if mover.device not in reasons:
                reasons[mover.device] = _refusal(mover)
            self.reason = self.reason or reasons[mover.device]
            if reasons[mover.device] is None and mover.flat is not None and mover.flip is None:
                self._movers[index] = mover
        self._movers = {index: mover for index, mover in self._movers.items() if mover.nbytes >= _LEAST}
        if on_device and not self._movers:
            self.reason = self.reason or "no tensor on a device is contiguous and large enough for a block"
        for mover in self._movers.values():
            if mover.device not in self._links:
                link = _device.Link(mover.torch, mover.device)
                link.refuse_capture(operation)
                self._links[mover.device] = link, link.ready()
        self.indices = frozenset(self._movers)

    def move(self, stretches: Sequence[Stretch], block: int) -> list[int]:
        """Move stretches; the core's callback, for any thread.

        Args:
            stretches: each a multiple of ``block`` bytes, and none larger than 16 MiB.
            block: the bytes that have a checksum, or 0 where none is wanted.

        Returns:
            The checksums of all blocks in their order: of what the device had, or has now.

        Raises:
            Exception: not all was moved. Nothing is under way.
        """
        found: dict[int, list[int]] = {}
        by_device: dict[Any, list[int]] = {}
        for number, stretch in enumerate(stretches):
            by_device.setdefault(self._movers[stretch[0]].device, []).append(number)
        for device, numbers in by_device.items():
            link, ready = self._links[device]
            these = [stretches[number] for number in numbers]
            moved = link.aside(ready, partial(self._moved, link, these, block))
            found.update(zip(numbers, moved, strict=True))
        return [sum_ for number in range(len(stretches)) for sum_ in found[number]]

    def _moved(self, link: _device.Link, stretches: Sequence[Stretch], block: int) -> list[list[int]]:
        views = [self._movers[index].flat[start : start + nbytes] for index, start, _, _, nbytes in stretches]

        def summed() -> list[list[int]]:
            if not block:
                return [[] for _ in views]
            bits = [_sums.enqueue(link.torch, view, block) for view in views]
            return [_sums.collect(some, block) for some in bits]

        before = summed() if self._write else None
        for view, (_, _, path, offset, nbytes) in zip(views, stretches, strict=True):
            file = self._file(link, path)
            (file.write if self._write else file.read)(view.data_ptr(), nbytes, offset)
        found = summed()
        if before is not None and before != found:
            # The usual path writes a copy, and sums that.
            raise RuntimeError("a tensor changed while it was written")
        return found

    def _file(self, link: _device.Link, path: str) -> File:
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                file = KINDS[link.device.type](link.torch, path, write=self._write)
            self._files[path] = file
            while len(self._files) > _MOST_FILES:
                # It is closed when the last thread has done with it.
                self._files.popitem(last=False)
            return file

    def close(self) -> None:
        """Close all files and forget the tensors."""
        self._files.clear()
        self._movers.clear()


def _refusal(mover: Any) -> str | None:
    """Why the device of a mover cannot, or None."""
    torch, device = mover.torch, mover.device
    kind = KINDS.get(device.type)
    if kind is None:
        return f"{device} is not a CUDA device"
    why: str | None = kind.missing(torch)
    return why or _sums.refusal(torch, device)
