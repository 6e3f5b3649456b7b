"""An object store behind a bad network."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import fastckpt
from fastckpt.exceptions import CheckpointError
from faults.row import Row, Run
from faults.trouble.proxy import FAULTS, NEVER, Proxy
from harness.s3 import BUCKET, Server, environment
from harness.states import numbered, which

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

CHANCES = (0.05, 0.2, 0.5)
#: In every third trial, an outage begins after at most this many requests.
OUTAGE, LATEST = 3, 30
#: Bytes of a state, which is sent in one request or in parts.
SIZES = (5_000, 300_001, 12_000_000)
SAVES = 3
FAILURES = (OSError, CheckpointError)


class Store:
    """The programs of a trial, and the acknowledged saves. Each trial has a separate place in the store."""

    def __init__(self, place: Path, url: str, nbytes: int) -> None:
        self.place, self.url, self.nbytes = place, url, nbytes
        self.begun = self.acknowledged = 0

    def copies(self, proxy: Proxy) -> str:
        """Copy a checkpoint to the store and back; return the fault, or an empty string."""
        fastckpt.save(numbered(1, self.nbytes), self.place / "source")
        self.begun = 1
        with failing():
            fastckpt.copy(self.place / "source", self.url)
            self.acknowledged = 1
        wrong = self.loaded(least=0)
        proxy.fail(0, 0)
        if wrong := wrong or self.loaded(least=self.acknowledged):
            return wrong
        # Copy again: the store has the whole checkpoint or a part of it.
        fastckpt.copy(self.place / "source", self.url)
        fastckpt.copy(self.url, self.place / "back")
        return self.loaded(least=1) or ("" if which(fastckpt.load(self.place / "back"), self.nbytes) == 1 else "other")

    def loaded(self, least: int) -> str:
        """Return the fault of a load, or an empty string; the load may fail if ``least`` is 0."""
        try:
            found = which(fastckpt.load(self.url), self.nbytes)
        except FAILURES as error:
            return f"it does not load: {error}" if least else ""
        except AssertionError as error:
            return str(error)
        return "" if found == 1 else f"{found} is there"

    def runs(self, proxy: Proxy) -> str:
        """Let a run drain to the store, and another run continue from there; return the fault, or an empty string."""
        with failing(), fastckpt.Manager(self.place / "run", remote=self.url, remote_keep=2) as run:
            for number in range(1, SAVES + 1):
                self.begun = number
                run.save(number, numbered(number, self.nbytes))
                with failing():
                    run.wait()
                    self.acknowledged = number
        with failing():
            # A restore skips checkpoints that it cannot read, with a warning.
            if wrong := self.restored(0, "ignore"):
                return wrong
        proxy.fail(0, 0)
        if wrong := self.restored(self.acknowledged):
            return wrong
        self.begun = self.acknowledged = SAVES + 1
        with fastckpt.Manager(self.place / "run", remote=self.url, remote_keep=2) as run:
            run.restore()
            run.save(self.begun, numbered(self.begun, self.nbytes))
        return self.restored(self.begun)

    def restored(self, least: int, warned: Literal["error", "ignore"] = "error") -> str:
        """Return the fault of a restore on a node with an empty disk, or an empty string."""
        empty = self.place / "empty"
        with warnings.catch_warnings():
            warnings.simplefilter(warned)
            run = fastckpt.Manager(empty, remote=self.url, read_only=True)
            restored = run.restore(fresh=least == 0)
        shutil.rmtree(empty, ignore_errors=True)
        found = 0 if restored is None else which(restored.state, self.nbytes)
        return "" if least <= found <= self.begun else f"{least} was acknowledged, and {found} is restored"


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Allow failures inside, as a program expects them of a network."""
    with contextlib.suppress(*FAILURES):
        yield


def _one(run: Run, proxy: Proxy, draw: random.Random) -> None:
    nbytes, chance, seed = draw.choice(SIZES), draw.choice(CHANCES), draw.random()
    name, outage = draw.choice(("copies", "runs")), draw.randrange(LATEST) if draw.randrange(OUTAGE) == 0 else NEVER
    with tempfile.TemporaryDirectory(dir=run.place) as place:
        store = Store(Path(place), f"s3://{BUCKET}/{run.made}", nbytes)
        proxy.fail(chance, seed, outage)
        try:
            wrong = getattr(store, name)(proxy)
        except Exception as error:  # noqa: BLE001 - whatever is raised was not promised
            wrong = f"{type(error).__name__}: {error}"
        proxy.fail(0, 0)
    run.count(f"{name}: {'whole' if store.acknowledged >= store.begun else 'failed'}")
    run.done(wrong and f"seed {run.seed}, {name} of {nbytes} with {chance}: {wrong}")


def _stores(run: Run) -> None:
    draw, server = run.draw, Server()
    proxy = Proxy(server.url)
    try:
        server.client().create_bucket(Bucket=BUCKET)
        os.environ.update(environment(proxy.url))
        while run.made < run.trials:
            _one(run, proxy, draw)
            server.forget()
    finally:
        proxy.close()
        server.close()
    for fault in FAULTS:
        run.count(f"requests {fault}", proxy.came[fault])
    if run.trials >= 20 and not all(proxy.came[fault] for fault in FAULTS):
        raise AssertionError(f"some faults never came: {proxy.came}")


ROWS = [
    Row(
        37,
        "bad network of a store",
        "A copy or drain to an object store is whole, or raises; a load is correct, or raises; later calls succeed.",
        "a proxy that loses, repeats, delays and refuses (500, 503) requests, and loses or truncates answers",
        "each fault is counted; without faults the same calls succeed",
        run=_stores,
        fast=2,
        nightly=90,
        part=15,
    ),
]
