"""A training loop of matrix products on a device, and how much an asynchronous save slows it.

The loop is AdamW over square matrices; its state is three times the parameters. A **window** is a number of steps that
begins and ends with an idle device. In the windows with a save, the save is requested while two steps are still queued
on the device, so that a call that waits for the device is noticed.

- **call**: seconds until ``save_async`` returns; **held**: seconds that the next step's hooks hold the host.
- **lost**: seconds that a window with a save takes longer than one without.
"""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

import fastckpt
from bench import GB
from bench.measure import grown, reset_peak, status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.gpu_device import Device

#: Steps that are queued when a save is requested.
QUEUED = 2
#: The minimum seconds of a window, and the maximum number of steps in it.
WINDOW, MOST = 1.0, 400


class Training:
    """Layers, an optimizer, and steps.

    Args:
        device: the device of the model.
        size: bytes of the state, roughly: parameters and two moments, in float32.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        # The width leaves room for at least four layers.
        self.width = next((width for width in (8192, 4096, 2048, 1024, 256) if size >= 48 * width * width), 64)
        layers = max(1, round(size / (12 * self.width**2)))
        torch.backends.cuda.matmul.allow_tf32 = True
        where = device.device
        self.weights = [
            torch.nn.Parameter(torch.randn(self.width, self.width, device=where) / self.width**0.5)
            for _ in range(layers)
        ]
        self.inputs = torch.randn(4096 if device.is_gpu else 64, self.width, device=where)
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-6, foreach=True)
        self.step()
        device.synchronize()

    def forward_backward(self) -> None:
        """Do a step without the update."""
        self.optimizer.zero_grad()
        x = self.inputs
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        x.sum().backward()

    def step(self) -> None:
        """Do one step; the device may not have done it yet."""
        self.forward_backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {
            "model": {f"layers.{index}.weight": weight.detach() for index, weight in enumerate(self.weights)},
            "optimizer": self.optimizer.state_dict(),
        }

    def timed(self, run: Callable[[], None], rounds: int = 3) -> float:
        """Return the median of the seconds that the device needs for ``run``."""
        seconds = []
        for _ in range(rounds):
            self.device.synchronize()
            began = time.perf_counter()
            run()
            self.device.synchronize()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


class Hooks:
    """Two hooks of all optimizers, one before fastckpt's own and one after: the time between them held the host."""

    def __init__(self) -> None:
        self.entered = 0.0
        self.held = 0.0
        self.handles: list[Any] = []

    def first(self) -> None:
        """Add the first hook; call this before the first lazy save."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def enter(*_: object) -> None:
            self.entered = time.perf_counter()

        self.handles.append(register_optimizer_step_pre_hook(enter))

    def last(self) -> None:
        """Add the last hook; call this after the first lazy save."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def leave(*_: object) -> None:
            self.held += time.perf_counter() - self.entered

        self.handles.append(register_optimizer_step_pre_hook(leave))

    def remove(self) -> None:
        """Remove both."""
        for handle in self.handles:
            handle.remove()


class Saves:
    """The ways of saving: each starts a save of the state to a path and returns how to wait until it is durable."""

    def __init__(self) -> None:
        self.stager: Any = None
        self.staging: Any = None
        self.handle: Any = None

    def plain(self, state: Any, path: Path) -> Callable[[], Any]:
        return fastckpt.save_async(state, path).result

    def lazy(self, state: Any, path: Path) -> Callable[[], Any]:
        return fastckpt.save_async(state, path, io=fastckpt.IO(lazy=True)).result

    def dcp(self, state: Any, path: Path) -> Callable[[], Any]:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if self.stager is None:
            pin = torch.cuda.is_available()
            self.stager = DefaultStager(StagingOptions(pin, False, pin, pin))
            self.handle = register_optimizer_step_pre_hook(self.wait_for_staging)
        writer = checkpoint.FileSystemWriter(path, thread_count=2, sync_files=True)
        future = checkpoint.async_save(state, storage_writer=writer, async_stager=self.stager, no_dist=True)
        self.staging = getattr(future, "staging_completion", None)
        return lambda: getattr(future, "upload_completion", future).result() and None

    def wait_for_staging(self, *_: object) -> None:
        """Wait before a step until the copies of DCP have ended: DCP leaves this wait to the training loop."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.result()

    def close(self) -> None:
        """Close everything that is kept between saves."""
        if self.handle is not None:
            self.handle.remove()
        if self.stager is not None:
            with suppress(Exception):
                self.stager.close()


def window(
    training: Training, steps: int, save: Callable[[], Callable[[], Any]] | None
) -> tuple[float, float, Callable[[], Any]]:
    """Return the seconds of a window and of the call, and how to wait for the save."""
    training.device.synchronize()
    began = time.perf_counter()
    for _ in range(QUEUED):
        training.step()
    asked = time.perf_counter()
    wait = save() if save else (lambda: None)
    call = time.perf_counter() - asked
    for _ in range(steps - QUEUED):
        training.step()
    training.device.synchronize()
    return time.perf_counter() - began, call, wait


class Rounds:
    """How much saves slow training, round by round: a window with each way of saving, each after one without a save.

    Args:
        training: the loop.
        directory: where to save.
        rate: the link's rate to the host, GB/s.

    Attributes:
        result: the figures so far.
    """

    def __init__(self, training: Training, directory: Path, rate: float) -> None:
        self.training, self.path = training, directory / "training"
        self.state = training.state()
        self.saves, self.hooks = Saves(), Hooks()
        self.modes = {
            "plain": self.saves.plain,
            "lazy": self.saves.lazy,
            "torch.distributed.checkpoint": self.saves.dcp,
        }
        self.samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in self.modes}
        self.alone: list[float] = []
        nbytes = sum(weight.nbytes for weight in training.weights) * 3
        step, copy = training.timed(training.step), nbytes / GB / rate
        # A save is durable long after its copy; a window must contain the copy.
        wanted = max(WINDOW if training.device.is_gpu else 0.05, 3 * copy)
        self.steps = QUEUED + max(4, min(MOST, round(wanted / step)))
        self.result: dict[str, Any] = {
            "bytes": nbytes,
            "tensors": len(training.weights) * 4,
            "step": step,
            "forward_backward": training.timed(training.forward_backward),
            "copy": copy,
            "steps": self.steps,
            "modes": {},
            "failed": {},
        }
        reset_peak()
        self.memory = status("VmRSS")

    def window(self, mode: str) -> dict[str, float]:
        """Measure a window with a save, and wait for the save."""
        self.hooks.held = 0.0
        took, call, wait = window(self.training, self.steps, lambda: self.modes[mode](self.state, self.path))
        began = time.perf_counter()
        report = wait()
        sample = {"window": took, "call": call, "held": self.hooks.held, "durable": took + time.perf_counter() - began}
        if report is not None:
            sample["reported"] = report.stall
        shutil.rmtree(self.path, ignore_errors=True)
        return sample

    def turn(self, number: int) -> None:
        """Do one round; round 0 warms up, with the first save of each way, which allocates its memory."""
        for mode in list(self.modes):
            self.alone.append(window(self.training, self.steps, None)[0])
            try:
                sample = self.window(mode)
            except Exception as error:  # noqa: BLE001 - one that fails is told, and left out
                first_line = (str(error).strip() or "no message").splitlines()[0]
                self.result["failed"][mode] = f"{type(error).__name__}: {first_line}"
                del self.modes[mode]
                continue
            if number:
                self.samples[mode].append(sample)
            else:
                self.result["modes"][mode] = {"first_call": sample["call"]}

    def conclude(self, number: int) -> None:
        """Bring the result up to date."""
        undisturbed = statistics.median(self.alone)
        self.result |= {"alone": undisturbed, "noise": max(self.alone) - min(self.alone), "rounds": number}
        for mode, each in self.samples.items():
            if each:
                middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
                self.result["modes"][mode] |= {**middle, "lost": middle["window"] - undisturbed}
        self.result["extra_bytes"] = grown(self.memory, status("VmHWM"))

    def run(self, rounds: int, until: float, tell: Callable[[dict[str, Any]], None]) -> None:
        """Do one to ``rounds`` rounds; no round begins that would end after ``until``.

        ``tell`` gets the result after each round.
        """
        self.hooks.first()
        self.turn(0)
        tell(self.result)
        self.hooks.last()
        self.alone.clear()
        for number in range(1, rounds + 1):
            began = time.monotonic()
            self.turn(number)
            self.conclude(number)
            tell(self.result)
            now = time.monotonic()
            if now + (now - began) > until:
                break
        self.hooks.remove()
        self.saves.close()


def measure_training(
    training: Training,
    directory: Path,
    until: float,
    tell: Callable[[dict[str, Any]], None],
    rate: float,
    rounds: int = 5,
) -> None:
    """Measure how much saves slow training, and pass the result to ``tell``; see :class:`Rounds`."""
    # Rounds get most of the time, and steps beside a save the rest.
    now = time.monotonic()
    measured = Rounds(training, directory, rate)
    measured.run(rounds, now + 0.8 * (until - now), tell)
    tell(measured.result | {"beside": steps_beside(training, measured.state, measured.path)})


def steps_beside(training: Training, state: Any, path: Path) -> dict[str, Any]:
    """Return the seconds of a step that is waited for, with and without a save in flight."""

    def timed() -> float:
        began = time.perf_counter()
        training.step()
        training.device.synchronize()
        return time.perf_counter() - began

    alone, beside = [], []
    for _ in range(2):
        alone += [timed() for _ in range(15)]
        pending = fastckpt.save_async(state, path, io=fastckpt.IO(lazy=True))
        while True:
            beside.append(timed())
            if pending.done():
                break
        pending.result()
    shutil.rmtree(path, ignore_errors=True)
    return {
        "alone": statistics.median(alone),
        "beside": statistics.median(beside),
        "worst": max(beside),
        "steps": len(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
    }
