"""A device to measure: CUDA or ROCm, the CPU to try out the benchmark itself, or the stand-in of the tests."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import GB, MIB
from bench.states import Workload, llama_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES = ("cuda", "cpu", "standin")
#: Bytes of one copy when the link is measured.
PIECE = 256 * MIB


class Device:
    """A device by name, one of ``DEVICES``.

    Raises:
        ImportError: the stand-in was requested, but ``tests/`` is not on the path or torch is too old for it.
        RuntimeError: there is no such device.
    """

    def __init__(self, name: str) -> None:
        if name == "standin":
            from harness import standin

            if not standin.AVAILABLE:
                raise ImportError("the stand-in device needs torch 2.10 or newer")
        self.name = name
        # The name has an index, because the device of a torch tensor has one, and the two must be equal.
        self.device = torch.device("cpu" if name == "cpu" else f"{name}:0")
        self.module = None if name == "cpu" else torch.get_device_module(self.device)
        if name == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(self.device)

    @property
    def is_gpu(self) -> bool:
        """Whether figures from it say anything about a GPU."""
        return self.name == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.module is not None:
            self.module.synchronize()

    def empty_cache(self) -> None:
        """Release device memory that torch keeps for future tensors."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Return the bytes of memory that is free for tensors."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.device)[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4

    def random(self, seed: int) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
        """Return a function that makes tensors of random bits (except for signs), equal for equal seeds."""
        # The stand-in cannot compute, so the CPU does.
        where = torch.device("cpu") if self.name == "standin" else self.device
        generator = torch.Generator(where).manual_seed(seed)

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=where)
            tensor.view(torch.int16).random_(generator=generator)
            return tensor.to(self.device)

        return make

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros."""
        return torch.zeros(shape, dtype=dtype).to(self.device)

    def about(self) -> dict[str, Any]:
        """Return the device's description for the report."""
        facts: dict[str, Any] = {"device": self.name, "torch": torch.__version__}
        if self.is_gpu:
            its = torch.cuda.get_device_properties(self.device)
            facts |= {"gpu": its.name, "gpu_bytes": its.total_memory, "cuda": torch.version.cuda}
        return facts


@dataclass(frozen=True)
class DeviceWorkload(Workload):
    """A workload whose tensors are on a device; of the kinds ``model`` and ``many``."""

    device: str = "cpu"

    def tensors(self, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state; ``make`` makes each tensor."""
        if self.kind == "many":
            shape = (max(1, self.size // 4),)
            return {f"parameter.{index:07d}": make(shape, torch.float32) for index in range(self.count)}
        return {name: make(shape, torch.bfloat16) for name, shape in llama_shapes(self.size)}

    def make(self) -> dict[str, torch.Tensor]:
        """Return the state; the device has made it."""
        device = Device(self.device)
        state = self.tensors(device.random(self.size))
        device.synchronize()
        return state

    def make_blank(self) -> dict[str, torch.Tensor]:
        """Return a state of the same shape, of zeros."""
        device = Device(self.device)
        state = self.tensors(device.zeros)
        device.synchronize()
        return state


# -- the link ----------------------------------------------------------------------------------------------------------


class Link:
    """Copies between the device and existing host memory, as fast as torch can: the limit of all saves and loads.

    Args:
        device: the device to measure.
        pinned: whether the host's memory is pinned.
        piece: bytes of a copy.
    """

    def __init__(self, device: Device, *, pinned: bool = True, piece: int = PIECE) -> None:
        self.device, self.piece = device, piece
        self.there = device.zeros((piece,), torch.uint8)
        self.here = torch.zeros(piece, dtype=torch.uint8, pin_memory=pinned and device.is_gpu)

    def copy(self, size: int, *, to_host: bool) -> float:
        """Copy ``size`` bytes, one piece after the other; return the seconds."""
        target, source = (self.here, self.there) if to_host else (self.there, self.here)
        self.device.synchronize()
        began = time.perf_counter()
        for start in range(0, size, self.piece):
            length = min(self.piece, size - start)
            target[:length].copy_(source[:length], non_blocking=True)
        self.device.synchronize()
        return time.perf_counter() - began


def measure_link(device: Device, size: int, rounds: int) -> dict[str, Any]:
    """Return the link's rates in GB/s, ``d2h`` and ``h2d``, with pinned and with pageable memory, in large and in 16
    MiB pieces: medians of interleaved rounds.
    """  # noqa: D205 - one sentence
    size = max(size, 16 * MIB)
    links = {
        "pinned": Link(device, piece=min(PIECE, size)),
        "pinned, 16 MiB": Link(device, piece=16 * MIB),
        "pageable": Link(device, pinned=False, piece=min(PIECE, size)),
    }
    samples: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, link in links.items():
            for way in ("d2h", "h2d"):
                rate = size / GB / link.copy(size, to_host=way == "d2h")
                if number:  # the first warms up
                    samples.setdefault(f"{way}, {name}", []).append(rate)
    return {name: statistics.median(rates) for name, rates in sorted(samples.items())}


# -- pinned memory -----------------------------------------------------------------------------------------------------


class Pinned:
    """Counts the bytes of host memory that are registered with CUDA, by wrapping the driver's two calls."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.peak = 0

    def install(self) -> None:
        """Count from now on, in this process; without CUDA nothing is counted."""
        if not torch.cuda.is_available():
            return
        runtime: Any = torch.cuda.cudart()
        register, unregister = runtime.cudaHostRegister, runtime.cudaHostUnregister

        def counted_register(address: int, nbytes: int, flags: int) -> Any:
            status = register(address, nbytes, flags)
            if not int(status):
                self.ranges[address] = nbytes
                self.peak = max(self.peak, sum(tuple(self.ranges.values())))
            return status

        def counted_unregister(address: int) -> Any:
            self.ranges.pop(address, None)
            return unregister(address)

        with contextlib.suppress(AttributeError, TypeError):
            runtime.cudaHostRegister, runtime.cudaHostUnregister = counted_register, counted_unregister


def available_memory() -> int:
    """Return the bytes of available host memory."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
