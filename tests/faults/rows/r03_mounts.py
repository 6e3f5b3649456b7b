"""Calls of a mount fail, as calls of a server may fail."""

from __future__ import annotations

import errno
from pathlib import Path

from faults.crash import disks
from faults.played import play
from faults.row import Row, Run
from faults.trouble import trials
from harness import in_memory as calls

#: The requests to a mount that read or change something, and the errors of each kind.
LOOKS = (calls.LOOKUP, calls.GETATTR, calls.OPEN, calls.READ, calls.OPENDIR, calls.READDIR)
CHANGES = (
    *(calls.CREATE, calls.MKDIR, calls.UNLINK, calls.RMDIR, calls.RENAME, calls.SET),
    *(calls.WRITE, calls.FSYNC, calls.FLUSH, calls.FSYNCDIR),
)
LOOK_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES)
CHANGE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _calls(run: Run) -> None:
    draw = run.draw
    disks.alone()
    with trials.served(run.place) as mount:
        point = Path(mount.point)
        while run.made < run.trials:
            scene = trials.drawn(draw)
            mount.ask(reset=True, arm=[])
            trials.undisturbed(scene, point)
            counts = {int(code): count for code, count in mount.ask(heal=True)["counts"].items()}
            for _ in range(min(trials.EACH, run.trials - run.made)):
                code = draw.choice([each for each in (*LOOKS, *CHANGES) if counts.get(each)])
                error = draw.choice(CHANGE_ERRORS if code in CHANGES else LOOK_ERRORS)
                at, once = draw.randint(1, counts[code]), draw.random() < 0.6
                mount.ask(reset=True, arm=[code], at=at, once=once, errno=error)
                came = play(scene, point)
                struck = mount.ask(heal=True)["came"]
                run.count("failed" if came.failure else "went on" if struck else "had no such call")
                wrong = trials.looked_at(scene, came, point, (error,))
                how = f"call {at} of {code} {errno.errorcode[error]} {'once' if once else 'for ever'}"
                run.done(wrong and f"{trials.about(run, scene)}, {how}: {wrong}", int(struck > 0))


ROWS = [
    Row(
        3,
        "calls of a mount",
        "The same if a server or a daemon serves the files and keeps removed files open.",
        "EIO, ESTALE, EACCES, ENOSPC, EDQUOT, EROFS from the k-th call of a FUSE mount, once or from then on",
        "each scene is played without a fault first; the mount counts the calls that failed",
        run=_calls,
        fast=24,
        nightly=600,
        part=100,
        mutants=("failed-write",),
        tried=200,
        root=True,
    ),
]
