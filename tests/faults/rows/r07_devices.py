"""Devices below a file system fail. Instead of dm-flakey and dm-error, which kernels of small machines often lack, a
FUSE mount with the one file ``disk``, below a loop device, fails."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

from faults.crash import disks
from faults.played import play
from faults.row import Row, Run
from faults.trouble import trials
from faults.trouble.mount import NAME
from harness.in_memory import FSYNC, WRITE

#: The errors of a file system whose device fails: some turn read-only, or refuse everything.
ERRORS = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ENODEV, errno.EUCLEAN)


def _devices(run: Run, kind: str) -> None:
    draw = run.draw
    disks.alone()
    image, point = run.place / "image", run.place / "mnt"
    image.write_bytes(disks.formatted(kind))
    point.mkdir()
    with trials.served(run.place) as mount:
        mount.ask(image=str(image))
        with disks.loop(str(Path(mount.point, NAME.decode())), "--direct-io=on") as device:
            while run.made < run.trials:
                scene = trials.drawn(draw)
                mount.ask(image=str(image))
                with disks.mounted(device, point, kind):
                    mount.ask(arm=[])
                    trials.undisturbed(scene, point)
                    counts = mount.ask(heal=True)["counts"]
                for _ in range(min(trials.EACH, run.trials - run.made)):
                    code, error = draw.choice((WRITE, FSYNC)), draw.choice((errno.EIO, errno.ENOSPC))
                    at, once = draw.randint(1, counts[str(code)]), draw.random() < 0.5
                    mount.ask(image=str(image))
                    with disks.mounted(device, point, kind):
                        mount.ask(arm=[code], at=at, once=once, errno=error)
                        came = play(scene, point)
                        ended = trials.badly(came, point, ERRORS)
                    # Data that was not written by now is not written by the unmount either.
                    struck = mount.ask(heal=True)["came"]
                    run.count("failed" if came.failure else "went on" if struck else "had no such call")
                    with disks.mounted(device, point, kind):
                        wrong = ended or trials.looked_at(scene, came, point, ERRORS)
                    how = f"{kind}, {'write' if code == WRITE else 'flush'} {at} {errno.errorcode[error]}"
                    how += " once" if once else " for ever"
                    run.done(wrong and f"{trials.about(run, scene)}, {how}: {wrong}", int(struck > 0))


ROWS = [
    Row(
        7,
        f"failing devices below {kind}",
        "A failed write or flush of the device is never a success; acknowledged saves stay; the next save works.",
        f"{kind} on a device whose k-th write or flush fails, once or from then on, until it is remounted "
        "(FUSE below a loop device: this kernel has no dm-error)",
        "each scene is played without a fault first; the device counts what it has failed",
        run=partial(_devices, kind=kind),
        fast=4,
        nightly=150,
        part=50,
        mutants=("failed-sync",) if kind == "ext4" else (),
        tried=100,
        root=True,
    )
    for kind in disks.SIZES
]
