"""The device for tests: the stand-in, or a real device with ``FASTCKPT_TEST_DEVICE=cuda``.

Files that import this one may need only the standard library, numpy, torch and fastckpt: a machine with a GPU
runs them by ``python -m unittest discover -s tests/device -t tests``.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

import fastckpt

from . import standin

KIND = os.environ.get("FASTCKPT_TEST_DEVICE", standin.NAME)
IS_STANDIN = KIND == standin.NAME
DEVICE = torch.device(KIND, 0)
OTHER = torch.device(KIND, 1)
faults = standin.faults

SAVES: dict[str, Callable[..., fastckpt.types.SaveReport]] = {
    "save": fastckpt.save,
    "async": lambda *arguments, **named: fastckpt.save_async(*arguments, **named).result(60),
    "lazy": lambda *arguments, **named: fastckpt.save_async(*arguments, io=fastckpt.IO(lazy=True), **named).result(60),
}


def missing(what: str) -> None:
    """Skip with a reason, but fail in CI, which must have everything."""
    if os.environ.get("CI") == "true":
        raise AssertionError(f"CI must provide this: {what}")
    raise unittest.SkipTest(f"NOT TESTED HERE: {what}")


def module() -> Any:
    """torch's module for the device: streams, events."""
    return torch.get_device_module(DEVICE)


def two_devices() -> None:
    """Require a second device."""
    if module().device_count() < 2:
        missing("needs two devices")


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], match: str) -> Iterator[list[BaseException]]:
    """Require that the body raises an exception of this kind with a message that matches ``match``."""
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
        if re.search(match, str(error)) is None:
            raise AssertionError(f"{match!r} is not in {str(error)!r}") from error
    if not caught:
        raise AssertionError(f"{kind} was not raised")


def each(name: str, values: Iterable[Any]) -> Callable[[Any], Any]:
    """Make one test for each of ``values``, which is passed as argument ``name``."""

    def mark(function: Any) -> Any:
        function.cases = [*getattr(function, "cases", []), (name, list(values))]
        return function

    return mark


def in_thread(body: Callable[[], Any]) -> Any:
    """Run ``body`` in a separate thread, and return or raise what it returns or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((body(), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.extend((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome
    if error is not None:
        raise error
    return result


class OnDevice(unittest.TestCase):
    """Tests on the device. Each test has its own directory, and leaves nothing behind."""

    #: The kind of device that the tests are for; None for all.
    on: ClassVar[str | None] = None
    #: The longest delay of a copy on the stand-in, in seconds.
    late: ClassVar[float] = 0.002
    path: Path

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for name, function in tuple(vars(cls).items()):
            cases = getattr(function, "cases", None)
            if cases is None:
                continue
            delattr(cls, name)
            keys = [key for key, _ in cases]
            for number, values in enumerate(itertools.product(*(values for _, values in cases))):
                text = "_".join(str(value) if isinstance(value, str | bool | int) else str(number) for value in values)
                setattr(cls, f"{name}__{text}", _bound(function, dict(zip(keys, values, strict=True))))

    @classmethod
    def setUpClass(cls) -> None:
        if cls.on is not None and cls.on != KIND:
            raise unittest.SkipTest(f"NOT TESTED HERE: needs the device {cls.on}")
        if IS_STANDIN:
            if not standin.AVAILABLE:
                missing("needs torch 2.10 (a device that is set up from Python)")
        elif not module().is_available():
            raise AssertionError(f"there is no device {KIND}")

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(prefix="fastckpt-test-")
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name)
        fastckpt.background.drain(60)
        fastckpt.background.release_buffers()
        faults.reset(late=self.late)
        standin.cudart.reset()
        self.addCleanup(self._leave)

    def _leave(self) -> None:
        misuse = faults.misuse
        faults.reset()
        standin.cudart.reset()
        try:
            fastckpt.background.drain(60)
        finally:
            standin.forget_errors()
            fastckpt.background.release_buffers()
        assert misuse == [], misuse
        assert not standin.cudart.registered, "memory is still registered"


def _bound(function: Any, named: dict[str, Any]) -> Any:
    @functools.wraps(function)
    def test(self: Any) -> None:
        function(self, **named)

    del test.cases  # type: ignore[attr-defined]
    del test.__wrapped__  # type: ignore[attr-defined]
    return test


def moved(value: torch.Tensor, device: torch.device = DEVICE) -> torch.Tensor:
    """A copy of the tensor on the device, with the same flags."""
    there = value.detach().to(device)
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(there, requires_grad=value.requires_grad)
    return there.requires_grad_(value.requires_grad)


def on_device(state: dict[str, Any], device: torch.device = DEVICE) -> dict[str, Any]:
    return {name: moved(value, device) for name, value in state.items()}


def there(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor now, without waiting for the work of other streams."""
    if tensor.device.type == standin.NAME:
        return standin.on_host(tensor).clone()
    return tensor.detach().clone().cpu()


def to_host(state: dict[str, Any]) -> dict[str, Any]:
    return {name: there(value) for name, value in state.items()}


def busy(seconds: float = 0.05) -> None:
    """Give the current stream other work first."""
    stream = module().current_stream(DEVICE)
    if IS_STANDIN:
        stream.worker.submit(lambda: time.sleep(seconds))
    else:
        torch.cuda._sleep(int(seconds * 1.5e9))


def fill_later(tensor: torch.Tensor, value: float, seconds: float = 0.05) -> None:
    """Make the current stream write to ``tensor``, without a wait of the host."""
    busy(seconds)
    tensor.fill_(value)


def synchronize() -> None:
    """Wait for everything on the device."""
    module().synchronize(DEVICE)


def free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that is still referenced, as sharded modules do, and give it to another tensor."""
    if IS_STANDIN:
        standin.free(tensor)
        return
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    # The caching allocator returns the same memory, unless something protects it.
    torch.full((nbytes,), standin.REUSED, dtype=torch.uint8, device=tensor.device)


def side_stream() -> Any:
    """A context in which the calling thread uses a separate stream."""
    return module().stream(module().Stream(device=DEVICE))


def on_time() -> Any:
    """A context in which copies of the stand-in take no time."""
    return _on_time() if IS_STANDIN else nullcontext()


@contextmanager
def _on_time() -> Iterator[None]:
    late, faults.late = faults.late, 0.0
    try:
        yield
    finally:
        faults.late = late
