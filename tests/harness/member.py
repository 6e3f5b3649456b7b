"""One rank of :mod:`harness.groups` in its process, which joins the group and then runs call after call."""

# ruff: noqa: BLE001, TC001 - the parent judges every exception; types by name

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from harness import groups, points
from harness.groups import decode, encode
from harness.zygote import Channel

# Imports of the first save, FSDP, tensor parallelism and DCP take a second or more, so they precede the forks.
for late in (
    "encodings.idna",
    "fastckpt.dcp",
    "fastckpt.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "harness.mounts",
    "harness.parallel",
    "harness.strace",
    "hypothesis",
    "hypothesis.strategies",
    "numpy.testing",
    "pytest",
):
    importlib.import_module(late)

PR_SET_PDEATHSIG = 1


def store(channel: Channel, *, host: str) -> NoReturn:
    """Serve the store of a job from a separate process, like torchrun's agent."""
    _die_with_parent()
    server = dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
    channel.send({"report": server.port})
    _until_closed(channel)


def serve(
    channel: Channel, *, rank: int, size: int, host: str, port: int, backend: str, timeout: float, apart: bool
) -> NoReturn:
    """Join the group, and run calls until the parent closes. Port 0: this rank has the store, which otherwise belongs
    to another rank, or is ``apart`` from all ranks."""
    groups.here = channel
    _die_with_parent()
    faulthandler.enable()  # a crash prints its stack into the captured output of a failed test
    torch.set_num_threads(1)
    master = port == 0
    client = dist.TCPStore(
        host, port, None, is_master=master, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    if master:
        channel.send({"report": client.port})
    # torchrun's variables, by which a program's `init_process_group("gloo")` joins the group.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR=host,
        MASTER_PORT=str(client.port),
        TORCHELASTIC_USE_AGENT_STORE=str(apart),
    )
    if backend:
        # Torch adds a prefix of its own to the keys.
        dist.init_process_group(backend, store=client, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    channel.send({"report": "joined"})
    while True:
        try:
            request = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        channel.send({"answer": encode(_call(channel, *request["function"], request["with"]))})


def _call(channel: Channel, module: str, name: str, folder: str, given: str) -> dict[str, Any]:
    # All processes of a machine share this clock.
    began = time.monotonic()
    answer: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        undo = None
        try:
            # Arguments may be objects of the test's module, too.
            if folder not in sys.path:
                sys.path.append(folder)
            args, kwargs, strike = decode(given)
            target = attrgetter(name)(importlib.import_module(module))
            undo = _arm(channel, strike)
            answer["value"] = target(*args, **kwargs)
            answer["kind"] = "returned"
            encode(answer)
        except BaseException as error:
            answer = {"kind": "raised", "raised": _described(error)}
        finally:
            if undo is not None:
                undo()
    answer.update(
        began=began,
        ended=time.monotonic(),
        warnings=[(each.category.__name__, str(each.message), each.filename, each.lineno) for each in caught],
    )
    return answer


def _described(error: BaseException) -> dict[str, Any]:
    try:
        kept = error if str(pickle.loads(pickle.dumps(error))) == str(error) else None
    except Exception:
        kept = None
    failures = getattr(error, "failures", ())
    if not isinstance(failures, tuple):  # torch has an exception with a dict of that name
        failures = ()
    return {
        "kind": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "text": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "failures": [tuple(getattr(each, key) for key in ("rank", "host", "message")) for each in failures],
        "trace": "".join(traceback.format_exception(error)),
        "error": kept,
    }


def _arm(channel: Channel, strike: Any) -> Callable[[], None] | None:
    """Make the struck call run the fault; return the function that undoes this."""
    if strike is None:
        return None
    left = [strike.nth]

    def hit(args: tuple[Any, ...]) -> bool:
        if strike.match is not None and strike.match not in args:
            return False
        left[0] -= 1
        return left[0] == 0

    def blow() -> None:
        if isinstance(strike.signal, BaseException):
            raise strike.signal
        channel.send({"struck": strike.signal == signal.SIGSTOP, "at": time.monotonic()})
        os.kill(os.getpid(), strike.signal)

    def struck(real: Any) -> Any:
        @functools.wraps(real, updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            due = hit(args)
            if due and strike.when == "before":
                blow()
            result = real(*args, **kwargs)
            if due and strike.when == "after":
                blow()
            return result

        return wrapper

    return points.replace(strike.where, struck)


def _die_with_parent() -> None:
    """End with the zygote, which ends with the test's process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _until_closed(channel: Channel) -> NoReturn:
    try:
        while True:
            channel.receive()
    except (EOFError, OSError):
        os._exit(0)
