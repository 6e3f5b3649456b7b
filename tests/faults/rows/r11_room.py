"""No space for pages, for names, or within a quota; and files that may not grow."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from faults.crash.scenes import SCENES, Copies
from faults.played import play
from faults.row import Row, Run
from faults.trouble import trials
from harness import mounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = 4096
#: The scenes that write only to the limited place, so that they meet its limit.
HERE = tuple(each for each in SCENES if each is not Copies)
STEP = 64 * PAGE
#: Spare pages, without which btrfs cannot even remove the limit.
SPARE = 16
BALLAST = "ballast"


class Room(NamedTuple):
    """A mount whose space, names or quota can be filled except for a given amount, and freed.

    Attributes:
        point: the mount point.
        most: an amount that is enough for each scene; 0 if that depends on the bytes of a state.
        take: fills the mount and leaves a given amount.
        give: frees everything that ``take`` took.
    """

    point: Path
    most: int
    take: Callable[[int], None]
    give: Callable[[], None]


@contextlib.contextmanager
def _pages(kind: str, size: int, options: str = "") -> Iterator[Room]:
    with mounts.mount(kind, size=size, options=options) as point:
        path = point / BALLAST

        def take(left: int) -> None:
            about = os.statvfs(point)
            taken = about.f_bfree * about.f_frsize - left * PAGE
            # A file system may have less than it reports: then fill as much as it accepts.
            for less in range(0, taken, STEP):
                with path.open("wb") as file, contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), 0, taken - less)
                    break

        yield Room(point, 0, take, path.unlink)


@contextlib.contextmanager
def _names(kind: str, size: int, options: str = "") -> Iterator[Room]:
    with mounts.mount(kind, size=size, options=options) as point:
        path = point / BALLAST

        def take(left: int) -> None:
            path.mkdir()
            for number in range(os.statvfs(point).f_ffree - left):
                (path / f"{number}").touch()

        yield Room(point, 40, take, lambda: shutil.rmtree(path))


@contextlib.contextmanager
def _quota(kind: str, size: int) -> Iterator[Room]:
    with mounts.mount(kind, size=size) as point:

        def limit(limit: str) -> None:
            command = ["btrfs", "qgroup", "limit", limit, str(point)]
            subprocess.run(command, check=True, capture_output=True)

        def take(left: int) -> None:
            # Writes count towards the quota when they are on the disk.
            os.sync()
            shown = subprocess.run(
                ["btrfs", "qgroup", "show", "--raw", "-f", str(point)], check=True, capture_output=True, text=True
            ).stdout
            used = int(shown.splitlines()[-1].split()[1])
            limit(str(used + (left + SPARE) * PAGE))

        subprocess.run(["btrfs", "quota", "enable", str(point)], check=True, capture_output=True)
        subprocess.run(["btrfs", "quota", "rescan", "-w", str(point)], check=True, capture_output=True)
        yield Room(point, 0, take, lambda: limit("none"))


ROOMS: dict[str, Callable[[], contextlib.AbstractContextManager[Room]]] = {
    "pages of tmpfs": lambda: _pages("tmpfs", 16 << 20),
    "pages of ext4": lambda: _pages("ext4", 32 << 20),
    "pages of xfs": lambda: _pages("xfs", 320 << 20),
    "pages of btrfs": lambda: _pages("btrfs", 160 << 20),
    "names of tmpfs": lambda: _names("tmpfs", 16 << 20, "nr_inodes=60"),
    "names of ext4": lambda: _names("ext4", 16 << 20),
    "quota of btrfs": lambda: _quota("btrfs", 160 << 20),
}


def _emptied(point: Path) -> None:
    for path in point.iterdir():
        if path.is_dir() and path.name != "lost+found":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def _room(run: Run) -> None:
    draw = run.draw
    with contextlib.ExitStack() as stack:
        rooms: dict[str, Room] = {}
        while run.made < run.trials:
            name = draw.choice(list(ROOMS))
            if name not in rooms:
                rooms[name] = stack.enter_context(ROOMS[name]())
            room, scene = rooms[name], trials.drawn(draw)
            most = room.most or 3 * scene.nbytes // PAGE + 10
            left = int(most * draw.random() ** 2)
            room.take(left)
            came = play(scene, room.point)
            room.give()
            run.count(f"{name}: {'refused' if came.failure else 'enough'}")
            wrong = trials.looked_at(scene, came, room.point, (errno.ENOSPC, errno.EDQUOT))
            run.done(wrong and f"{trials.about(run, scene)}, {name}, {left} left: {wrong}")
            _emptied(room.point)
    if run.trials >= 100 and not all(run.details.get(f"{name}: refused") for name in ROOMS):
        raise AssertionError(f"some mounts were never full: {run.details}")


def _limits(run: Run) -> None:
    draw, point = run.draw, run.place / "here"
    while run.made < run.trials:
        scene = trials.drawn(draw, HERE)
        # Some limits are whole pages or sectors.
        limit = draw.randrange(int(1.1 * scene.nbytes) + 10_000) // (unit := draw.choice((1, 1, 512, PAGE))) * unit

        def before(limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        point.mkdir()
        came = play(scene, point, before=before)
        run.count("refused" if came.failure else "enough")
        wrong = trials.looked_at(scene, came, point, (errno.EFBIG,))
        run.done(wrong and f"{trials.about(run, scene)}, at most {limit} bytes: {wrong}")
        shutil.rmtree(point)


ROWS = [
    Row(
        9,
        "limits of files",
        "The same if a file reaches its size limit at any point.",
        "random RLIMIT_FSIZE; saves, removals, base=, files=, a Manager",
        "some saves are refused, and some are not",
        run=_limits,
        fast=12,
        nightly=1000,
        part=100,
    ),
    Row(
        11,
        "no room",
        "The same if a save runs out of pages, inodes or quota at any point.",
        "a random number of free pages (tmpfs, ext4, XFS, btrfs), inodes (tmpfs, ext4) or bytes of a quota "
        "(btrfs; this kernel has no other quotas)",
        "each kind refuses some saves; with room again the next save succeeds",
        run=_room,
        fast=12,
        nightly=300,
        part=100,
        root=True,
    ),
]
