"""Queries the CUDA driver in a child process: the driver may hang, and this process should not hold a context."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds to wait for an answer; drivers without persistence mode take about 1 s per device.
_PATIENCE = 3.0

#: cuInit, cuDriverGetVersion and cuDeviceGetCount of the driver API.
_QUESTION = """
import ctypes, json
driver = ctypes.CDLL("libcuda.so.1")
number = ctypes.c_int()
def ask(call, *arguments):
    status = getattr(driver, call)(*arguments)
    if status:
        raise SystemExit(print(json.dumps({"error": f"{call} answers {status}"})))
    return number.value
ask("cuInit", 0)
version = ask("cuDriverGetVersion", ctypes.byref(number))
devices = ask("cuDeviceGetCount", ctypes.byref(number))
print(json.dumps({"devices": devices, "version": f"{version // 1000}.{version % 1000 // 10}"}))
"""


@contextlib.contextmanager
def asking() -> Iterator[Callable[[], dict[str, Any]]]:
    """A context that runs the query; its value is a function that waits for the answer.

    The answer has ``devices`` (a number, None if unknown), ``version`` (the newest CUDA that the driver runs) and
    ``error``.
    """
    nothing: dict[str, Any] = {"devices": None, "version": None, "error": None}
    try:
        child = subprocess.Popen(  # noqa: S603 - this interpreter, with a constant
            [sys.executable, "-I", "-S", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except (OSError, ValueError, TypeError) as error:
        yield lambda error=error: {**nothing, "error": f"cannot query the driver: {error}"}  # type: ignore[misc]
        return

    def answer() -> dict[str, Any]:
        try:
            out, complaint = child.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return {**nothing, "error": f"the driver has not answered for {_PATIENCE:.0f} s"}
        with contextlib.suppress(ValueError):
            return {**nothing, **json.loads(out)}
        if "libcuda.so.1" in complaint:
            return {**nothing, "devices": 0, "error": "no driver: libcuda.so.1 is missing"}
        return {**nothing, "error": complaint.strip().rpartition("\n")[2] or f"exit status {child.returncode}"}

    try:
        yield answer
    finally:
        child.kill()
        child.communicate()
