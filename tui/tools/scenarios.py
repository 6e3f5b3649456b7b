"""Makes the pictures of the monitor in the documents, from processes that really save and load. Needs root.

    python tui/tools/scenarios.py docs                       # all pictures: docs/monitor.svg and docs/pictures/
    python tui/tools/scenarios.py docs --only dead enospc
    python tui/tools/scenarios.py docs --recordings DIR      # draw existing recordings, without a new run

One disk represents the disks of a node: the kernel (the cgroup controller blkio) holds each rank to its own rate. A
seccomp filter refuses io_uring, a small tmpfs is the full disk, and signals stop and kill ranks. Host name and mounts
are in a separate namespace, in which a mount covers /mnt. A run takes 5 GB of memory, and 5 GB of a disk that has no
partitions.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node import BLKIO, MB, REPOSITORY, Disk, Node
from picture import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOUNT: Final = Path("/mnt/checkpoints")
"""The directory in which the checkpoints appear to be."""
NAMESPACE: Final = "FASTCKPT_PICTURES_NAMESPACE"


def begin(node: Node) -> None:
    """A save and a pause before the subject of the picture, so that there is a history."""
    node.save(100)
    node.until_done()
    node.rest(4)
    node.remove(100)


def in_the_midst(node: Node) -> None:
    """A save in which every rank writes."""
    begin(node)
    node.save(200)
    node.until_progress(0.6)


def held(node: Node) -> None:
    """A save with a bandwidth limit from the caller."""
    begin(node)
    node.save(200, bandwidth_limit=50 * MB)
    node.until_progress(0.6)


def a_minute(node: Node) -> None:
    """A save, a load and another save, up to the point at which one rank is left behind."""
    node.rest(3)
    node.save(1000)
    node.until_done()
    node.rest(9)
    node.load(1000)
    node.until_done()
    node.rest(12)
    node.remove(1000)
    node.save(2000)
    node.until_progress(0.75)


def stopped(node: Node) -> None:
    """A rank is stopped in the middle of a save."""
    begin(node)
    node.save(200)
    node.until_progress(0.3)
    node.signal(1, signal.SIGSTOP)
    node.rest(12)


def killed(node: Node) -> None:
    """A rank is killed in the middle of a save; the others continue."""
    begin(node)
    node.save(200)
    node.until_progress(0.3)
    node.signal(1, signal.SIGKILL)
    node.rest(1.5)


def full(node: Node) -> None:
    """A rank's file system has room for one checkpoint but not for two; the others continue."""
    node.save(200)
    node.until_done()
    node.rest(4)
    node.save(300)
    node.rest(1.5)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A picture.

    Attributes:
        path: The path of the SVG, below the documents.
        act: Plays the scenario, up to the moment of the picture.
        disks: The disk of each rank.
        rank_mb: MB of each rank's state.
        threads: The threads of each rank.
        size: Columns and lines.
    """

    path: str
    act: Callable[[Node], None]
    disks: tuple[Disk, ...]
    rank_mb: int = 400
    threads: int = 2
    size: tuple[int, int] = (100, 26)


_GOOD: Final = Disk()
_FAIR: Final = Disk(rate=128 * MB)
_SLOW: Final = Disk(rate=45 * MB)
_FILTERED: Final = Disk(refused="EPERM")
SCENARIOS: Final = {
    "monitor": Scenario(
        "monitor.svg",
        a_minute,
        (*[_FAIR] * 6, Disk(rate=65 * MB, refused="EPERM"), _FAIR),
        rank_mb=600,
        threads=4,
        size=(120, 30),
    ),
    "fast": Scenario("pictures/fast.svg", in_the_midst, (_GOOD,) * 4),
    "slow-disk": Scenario("pictures/slow-disk.svg", in_the_midst, (_SLOW,) * 4),
    "limit": Scenario("pictures/limit.svg", held, (_GOOD,) * 4),
    "straggler": Scenario("pictures/straggler.svg", in_the_midst, (_GOOD, _GOOD, _SLOW, _GOOD)),
    "fallback": Scenario("pictures/fallback.svg", in_the_midst, (_FILTERED,) * 4),
    "stall": Scenario("pictures/stall.svg", stopped, (_GOOD,) * 4),
    "dead": Scenario("pictures/dead.svg", killed, (_GOOD,) * 4),
    "enospc": Scenario("pictures/enospc.svg", full, (_GOOD, _GOOD, _GOOD, Disk(size=600 * MB))),
}


def main() -> int:
    """Make pictures.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docs", type=Path, help="directory of the documents")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="keep recordings there, and draw those of it")
    args = parser.parse_args()
    with ExitStack() as exits:
        kept = args.recordings or Path(exits.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        lacking = [name for name in args.only if not _recording(kept, name).exists()]
        if lacking and NAMESPACE not in os.environ:
            return _again(sys.argv[1:])
        for name in args.only:
            scenario, recording = SCENARIOS[name], _recording(kept, name)
            if name in lacking:
                print(f"{name}: running", flush=True)
                record(scenario, recording)
            path = args.docs / scenario.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw(recording, scenario.size), "utf-8")
            print(f"{name}: {path}", flush=True)
    return 0


def record(scenario: Scenario, recording: Path) -> None:
    """Run a scenario. The recording ends at the moment of the picture."""
    (REPOSITORY / "target").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "target") as files:
        half = recording.with_name("part-" + recording.name)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", MOUNT.parent], check=True)
        try:
            MOUNT.mkdir()
            subprocess.run(["mount", "--bind", files, MOUNT], check=True)
            with Node(MOUNT, half, scenario.threads) as node:
                node.start(scenario.disks, scenario.rank_mb * MB)
                scenario.act(node)
            half.rename(recording)
        finally:
            subprocess.run(["umount", "--recursive", "--lazy", MOUNT.parent], check=True)


def _recording(kept: Path, name: str) -> Path:
    return kept / f"{name}.jsonl.gz"


def _again(arguments: Sequence[str]) -> int:
    """Run this program in separate namespaces for mounts and the host name."""
    if os.geteuid() != 0 or not BLKIO.is_dir():
        print("scenarios: needs root, and the cgroup controller blkio mounted at", BLKIO, file=sys.stderr)
        return 1
    inner = ["sh", "-c", 'hostname node07 && exec "$@"', "sh", sys.executable, __file__, *arguments]
    return subprocess.call(["unshare", "--mount", "--uts", *inner], env=os.environ | {NAMESPACE: "1"})


if __name__ == "__main__":
    sys.exit(main())
