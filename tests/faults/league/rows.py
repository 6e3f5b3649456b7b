"""The faults, each with a trial for a library.

The outcome of a trial is ``good``; ``lost``: a step that was reported as saved is gone, and the run continues from an
older step; ``stuck``: no resume until a person removes or repairs something; ``wrong``: bytes of no saved step, without
an error; ``hung``: no end within a minute. After each resume, the run must continue and save again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from faults.crash import disks
from faults.crash import states as cut

from . import states
from .children import HUNG, Child, End
from .libraries import Library, free_port, meet

if TYPE_CHECKING:
    import random
    from pathlib import Path

GOOD, LOST, STUCK, WRONG, HANGS = "good", "lost", "stuck", "wrong", "hung"


class Trial:
    """One library in one directory."""

    def __init__(self, library: Library, directory: Path, draw: random.Random) -> None:
        self.library, self.directory, self.draw = library, directory, draw
        directory.mkdir(exist_ok=True)

    def train(self, steps: Iterable[int], run: int = 0, note: Callable[[int], None] | None = None) -> Child:
        """Start a training."""

        def work(told: Callable[[int], None]) -> None:
            states.run = run
            self.library.train(self.directory, steps, told)

        return Child(work, note)

    def train_on_two_ranks(self, steps: Iterable[int]) -> list[Child]:
        """Start a training of two ranks."""
        port = free_port()

        def work(rank: int, told: Callable[[int], None]) -> None:
            meet(rank, 2, port)
            self.library.train(self.directory, steps, told)

        return [Child(partial(work, rank)) for rank in range(2)]

    def resume(self) -> End:
        """Return the result of a resume: the step, ``wrong``, or None for no checkpoint."""

        def work(_: Callable[[int], None]) -> int | str | None:
            state = self.library.resume(self.directory)
            if state is None:
                return None
            step = states.step_of(state)
            return WRONG if step is None else step

        return Child(work).end()

    def saved(self, steps: Iterable[int]) -> None:
        """Save steps undisturbed."""
        child = self.train(steps)
        end = child.end()
        if end.how != "returned":
            raise AssertionError(f"{self.library.title}: undisturbed: {end}")

    def verdict(self, acknowledged: int, *, at_least: int | None = None) -> str:
        """Return the outcome of a run whose last reported step is ``acknowledged``; ``at_least`` must be restored."""
        found = self.resume()
        least = acknowledged if at_least is None else at_least
        if found.how == "hung":
            return HANGS
        if found.how != "returned" or (found.value is None and least > 0):
            return STUCK
        if found.value == WRONG:
            return WRONG
        step = found.value or 0
        following = step + 1
        child = self.train([following])
        end = child.end()
        if end.how == "hung":
            return HANGS
        after = self.resume()
        if end.how != "returned" or after != End("returned", following):
            return STUCK
        return GOOD if step >= least else LOST


def kill(trial: Trial, first: int) -> str:
    """Send SIGKILL at a random moment of the save after the step ``first``, or of the work after that save."""
    child = trial.train(range(1, 200))
    child.read(time.monotonic() + HUNG, first + 1)
    began = time.monotonic()
    child.read(began + HUNG, first + 2)
    each = time.monotonic() - began
    child.read(time.monotonic() + trial.draw.uniform(0, 1.5 * each))
    child.kill()
    child.end()
    return trial.verdict(max(child.told, default=0))


def undisturbed(trial: Trial) -> str:
    """Inject no fault: a control."""
    trial.saved([1, 2, 3])
    return trial.verdict(3)


def first_save(trial: Trial) -> str:
    """Send SIGKILL at a random moment before the first step is reported."""
    child = trial.train([1])
    began = time.monotonic()
    child.read(began + HUNG, 1)
    longest = time.monotonic() - began
    child.end()
    for one in sorted(trial.directory.rglob("*"), reverse=True):
        one.unlink() if one.is_file() or one.is_symlink() else one.rmdir()
    child = trial.train([1])
    child.read(time.monotonic() + trial.draw.uniform(0.3, 1) * longest)
    child.kill()
    child.end()
    return trial.verdict(max(child.told, default=0))


def in_a_save(trial: Trial) -> str:
    """Send SIGKILL during a save when older checkpoints exist."""
    return kill(trial, 1)


def in_retention(trial: Trial) -> str:
    """Send SIGKILL around the removal of older checkpoints, after more saves than the library keeps."""
    return kill(trial, 1 + (trial.library.keeps or 2))


def _files(trial: Trial) -> dict[Path, tuple[int, int]]:
    """Return each file, with the attributes that change when the file is written or replaced."""
    found = {one: one.stat() for one in sorted(trial.directory.rglob("*")) if one.is_file() and one.stat().st_size}
    return {one: (about.st_ino, about.st_mtime_ns) for one, about in found.items()}


def _damage(trial: Trial, damage: Callable[[Path], None]) -> str:
    """Damage a file of the newest checkpoint: an error or an older checkpoint is good."""
    trial.saved([1, 2])
    before = _files(trial)
    trial.saved([3])
    files = sorted(path for path, _ in _files(trial).items() - before.items())
    damage(trial.draw.choices(files, [one.stat().st_size for one in files])[0])
    found = trial.resume()
    if found.how == "hung":
        return HANGS
    return WRONG if found.value == WRONG else GOOD


def flipped_bit(trial: Trial) -> str:
    """Flip one bit of the newest checkpoint."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[trial.draw.randrange(len(content))] ^= 1 << trial.draw.randrange(8)
        path.write_bytes(content)

    return _damage(trial, flip)


def zeroed_block(trial: Trial) -> str:
    """Zero 4 KiB of the newest checkpoint, as a torn write may."""

    def zero(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(trial.draw.randrange(-(-path.stat().st_size // 4096)) * 4096)
            file.write(bytes(min(4096, path.stat().st_size - file.tell())))

    return _damage(trial, zero)


def full_disk(trial: Trial) -> str:
    """Leave space for only a part of a checkpoint; later, provide enough."""
    with _tmpfs(trial.directory, 64 << 20):
        trial.saved([1, 2])
        size = states.TENSORS * states.LENGTH * 4
        about = os.statvfs(trial.directory)
        free = about.f_bavail * about.f_frsize
        ballast = trial.directory / ".ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - int(size * trial.draw.uniform(0.05, 0.95)))
        child = trial.train([3])
        end = child.end()
        ballast.unlink()
        if end.how == "hung":
            return HANGS
        return trial.verdict(max(child.told, default=2))


def power_cut(trial: Trial) -> str:
    """Cut the power of ext4 on a device with a volatile cache (:mod:`faults.crash`)."""
    kind, home = "ext4", trial.directory
    with disks.recorded(kind, trial.draw.randrange(1 << 30), home) as (point, mark, log):
        trial.directory = point
        child = trial.train([1, 2, 3], note=lambda step: mark(f"acknowledged {step}"))
        if child.end().how != "returned":
            raise AssertionError(f"{trial.library.title}: undisturbed, it failed")
    state = next(cut.after(disks.formatted(kind), log, cut.cuts(log, 1, trial.draw), trial.draw))
    acknowledged = max((int(mark.split()[1]) for mark in state.marks if mark.startswith("ack")), default=0)
    with disks.shelf(kind, home) as shelf:
        shelf.put(state.image, state.used)
        with shelf.mounted(kind) as trial.directory:
            return trial.verdict(acknowledged)


def two_savers(trial: Trial) -> str:
    """Let two trainings save different states to the same place at the same time."""
    both = [trial.train(range(1, 7), run) for run in (0, 1)]
    ends = [child.end() for child in both]
    if any(end.how == "hung" for end in ends):
        return HANGS
    # A saver that raises an error because of the other saver has lost nothing.
    return trial.verdict(0, at_least=1)


def _struck_rank(trial: Trial, strike: int) -> str:
    """Kill or stop rank 1 at a random moment of a save: rank 0 must end by itself."""
    first, second = trial.train_on_two_ranks(range(1, 200))
    first.read(time.monotonic() + HUNG, 2)
    began = time.monotonic()
    first.read(began + HUNG, 3)
    first.read(time.monotonic() + trial.draw.uniform(0, 1.5 * (time.monotonic() - began)))
    os.kill(second.pid, strike)
    end = first.end()
    second.kill()
    second.end()
    return HANGS if end.how == "hung" else trial.verdict(max(first.told, default=0))


def killed_rank(trial: Trial) -> str:
    """Send SIGKILL to one of two ranks."""
    return _struck_rank(trial, signal.SIGKILL)


def stopped_rank(trial: Trial) -> str:
    """Send SIGSTOP to one of two ranks."""
    return _struck_rank(trial, signal.SIGSTOP)


@contextlib.contextmanager
def _tmpfs(point: Path, size: int) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", point], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


ALL: dict[str, Callable[[Trial], str]] = {
    "undisturbed": undisturbed,
    "killed in the first save": first_save,
    "killed in a save": in_a_save,
    "killed at the removal of older ones": in_retention,
    "power cut": power_cut,
    "disk full": full_disk,
    "one bit flipped": flipped_bit,
    "4 KiB zeroed": zeroed_block,
    "two savers": two_savers,
    "a rank killed": killed_rank,
    "a rank stopped": stopped_rank,
}
#: The rows for jobs whose ranks write together.
RANKED = {"a rank killed", "a rank stopped"}
