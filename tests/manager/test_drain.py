"""The drain: its copies and their order, its locks, its failures, and its end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import fastckpt
from fastckpt import _core, keep
from fastckpt._manager import drain as draining
from fastckpt._manager import prefix
from fastckpt._manager.directory import Directory, Names
from fastckpt._manager.remote import remote_of
from fastckpt._manager.tier import Tier
from fastckpt._stores.objects import Objects
from harness import manifest
from harness.s3 import BUCKET
from harness.tiers import at_remote

NAMES = Names("step-{step:08d}")
#: A deadline that only a hanging test reaches.
LONG = 60.0


class Copier:
    """Wraps the copy function: records calls, and may hold them or make them fail."""

    def __init__(self, real):
        self.real = real
        self.asked = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.fail = {}
        self.meanwhile = self.afterwards = lambda: None

    def __call__(self, sources, target, **options):
        step = NAMES.step_of(target.rpartition("/")[2])
        self.asked.append(step)
        self.begun.release()
        while not self.gate.wait(0.01):
            if options["stop"]():
                raise CancelledError
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        error = self.fail.get(step, self.fail.get("all"))
        if error is not None:
            raise error
        copied = self.real(sources, target, **options)
        afterwards, self.afterwards = self.afterwards, lambda: None
        afterwards()
        return copied


@pytest.fixture
def copier(monkeypatch):
    copier = Copier(draining.copy_checkpoint)
    monkeypatch.setattr(draining, "copy_checkpoint", copier)
    monkeypatch.setattr(draining, "_FIRST", 0.01)
    monkeypatch.setattr(draining, "_MOST", 0.02)
    yield copier
    copier.gate.set()
    # A failing copy is retried forever, and would reach the next test.
    for drain in tuple(draining._running):
        drain.leave(0.0)


class Run:
    """A local tier, a remote one, and the drain between them."""

    def __init__(self, root, remote, policies=(), **options):
        self.local = Directory(str(root / "local"), NAMES)
        local = Tier(self.local, [])
        self.tier = remote_of(remote, policies, local)
        self.settled = 0
        local.clear_again = self._settle
        self.drain = draining.Drain(local, self.tier, **{"limit": None, "deadline": lambda: float("inf"), **options})

    def _settle(self):
        self.settled += 1

    def save(self, *steps, add=True):
        for step in steps:
            fastckpt.save({"w": np.full(1000, step)}, self.local.path_of(step), metadata={"step": step})
            if add:
                self.drain.add(step)
                self.drain.start()

    def wait(self):
        self.drain.wait(time.monotonic() + LONG, lambda: False)

    def wait_anew(self):
        """Wait after a repair: an attempt that began before it may still fail."""
        with contextlib.suppress(OSError):
            self.wait()
        self.wait()

    def there(self):
        return self.tier.place.look().steps


@pytest.fixture(params=["path", "memory"])
def run(tmp_path, request, copier):
    remote = tmp_path / "remote" if request.param == "path" else f"memory://{tmp_path.name}/run"
    return Run(tmp_path, remote)


def damage(run, step):
    with Path(run.local.path_of(step), "model.safetensors").open("r+b") as changed:
        changed.seek(-1, 2)
        changed.write(b"\x55")


def hold(copier):
    """Make the next copy wait at the gate."""
    copier.gate.clear()


def until_begun(copier):
    assert copier.begun.acquire(timeout=LONG)


def test_the_last_step_goes_first(run, copier):
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.save(2, 3)
    assert run.drain.holds(1)
    assert run.drain.holds(2)
    copier.gate.set()
    run.wait()
    assert copier.asked == [1, 3, 2]
    assert run.there() == [1, 2, 3]
    assert not any(map(run.drain.holds, [1, 2, 3]))
    assert run.tier.place.read("latest") == b"step-00000003\n"
    assert fastckpt.load(run.tier.place.path_of(2))["w"][0] == 2
    assert run.settled == 3


def test_what_a_process_left_is_copied_by_the_next(run, copier):
    run.save(1, 2, 3, add=False)
    run.drain.resume()
    run.wait()
    assert copier.asked == [3, 2, 1]
    assert run.there() == [1, 2, 3]


def test_a_step_that_was_never_seen_is_held_and_copied(run):
    run.save(1, add=False)
    assert run.drain.holds(1)
    run.wait()
    assert run.there() == [1]
    assert not run.drain.holds(1)


def test_a_step_that_was_never_seen_goes_last(run, copier):
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.save(2, add=False)
    run.save(3)
    assert run.drain.holds(2)
    copier.gate.set()
    run.wait()
    assert copier.asked == [1, 3, 2]
    assert run.tier.place.read("latest") == b"step-00000003\n"


def test_a_failure_is_logged_once_and_tried_again(run, copier, caplog):
    caplog.set_level(logging.INFO, "fastckpt")
    copier.fail["all"] = OSError(5, "no route to the store")
    run.save(1)
    for _ in range(4):
        until_begun(copier)
    run.save(2)  # saves continue
    del copier.fail["all"]
    run.wait_anew()
    assert run.there() == [1, 2]
    told = [one for one in caplog.records if "no route" in one.getMessage()]
    assert [one.levelname for one in told] == ["WARNING"]
    assert "step 1 is not at" in told[0].getMessage()
    assert any("answers again" in one.getMessage() for one in caplog.records)


def test_wait_raises_what_keeps_a_step_from_the_remote(run, copier):
    copier.fail[1] = OSError(5, "no route to the store")
    run.save(1, 2)
    with pytest.raises(OSError, match="no route"):
        run.wait()
    assert run.there() == [2]
    assert run.drain.holds(1)
    del copier.fail[1]
    run.wait_anew()
    assert run.there() == [1, 2]


def test_wait_has_a_limit(run, copier):
    hold(copier)
    run.save(1)
    with pytest.raises(TimeoutError, match="still being copied"):
        run.drain.wait(time.monotonic(), lambda: False)
    copier.gate.set()
    run.wait()


@pytest.mark.parametrize("own", [True, False])
def test_a_damaged_checkpoint_is_told_once_and_let_go(run, caplog, own):
    run.save(1, 2, add=False)
    damage(run, 1)
    if own:
        run.drain.add(1)
    run.drain.resume()
    # A damaged checkpoint of an earlier run does not fail a later run.
    with pytest.raises(fastckpt.exceptions.CorruptCheckpointError) if own else contextlib.nullcontext():
        run.wait()
    run.wait()
    assert run.there() == [2]
    assert not run.drain.holds(1)
    assert [one.levelname for one in caplog.records] == ["ERROR"]


def go_back(drain):
    with drain.going_back(1, from_here=True):
        pass


def test_who_goes_back_hears_nothing_of_a_step_that_is_given_up(run):
    run.save(1, 2, add=False)
    damage(run, 2)
    run.drain.add(2)
    run.drain.start()
    run.drain.end()
    go_back(run.drain)
    run.wait()
    assert run.there() == [1]


def test_what_is_above_a_step_that_cannot_be_gone_back_to_is_still_copied(run, copier):
    copier.fail = {"all": OSError(errno.EIO, "the store does not answer")}
    run.save(1, 2)
    with pytest.raises(OSError, match="does not answer"):
        go_back(run.drain)
    assert run.drain.holds(2)
    copier.fail = {}
    run.wait_anew()
    assert run.there() == [1, 2]


@pytest.mark.parametrize(
    ("where", "error"), [("before", KeyboardInterrupt), ("after", KeyboardInterrupt), ("after", RuntimeError)]
)
def test_an_interrupt_while_the_thread_starts_leaves_nobody_waiting(run, where, error):
    start = threading.Thread.start

    def interrupted(thread):
        if where == "after":
            start(thread)
        raise error

    with mock.patch.object(threading.Thread, "start", interrupted), pytest.raises(error):
        run.save(1)
    run.wait()
    assert run.there() == [1]


@pytest.mark.parametrize("stops", ["go_back", "leave"])
def test_who_is_interrupted_while_a_copy_is_given_up_has_the_rest_copied(run, stops):
    run.save(1)
    run.wait()
    with mock.patch.object(run.drain, "end", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        go_back(run.drain) if stops == "go_back" else run.drain.leave(1)
    run.save(2)
    run.wait()
    assert run.there() == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_saved_again_while_it_is_copied_is_copied_again(run, copier, caplog, fails):
    def again():
        fastckpt.save({"w": np.full(1000, 77)}, run.local.path_of(1))
        if fails:
            raise fastckpt.exceptions.CorruptCheckpointError("it has changed")

    hold(copier)
    copier.meanwhile = again
    run.save(1)
    until_begun(copier)
    copier.gate.set()
    until_begun(copier) if fails else None
    run.drain.add(1)
    run.drain.start()
    run.wait()
    assert fastckpt.load(run.tier.place.path_of(1))["w"][0] == 77
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_step_saved_again_before_its_copy_is_noted_is_copied_again(run, copier):
    def again():
        fastckpt.save({"w": np.full(1000, 77)}, run.local.path_of(1))
        run.drain.add(1)

    copier.afterwards = again
    run.save(1)
    run.wait()
    assert copier.asked == [1, 1]
    assert fastckpt.load(run.tier.place.path_of(1))["w"][0] == 77


def test_steps_of_an_earlier_run_beyond_the_last_save_count_for_nothing(tmp_path, copier):
    run = Run(tmp_path, f"memory://{tmp_path.name}/run", [keep.Last(1), keep.Steps(8)])
    run.save(8, 9, add=False)
    hold(copier)
    run.drain.resume()
    until_begun(copier)
    run.save(4)
    copier.gate.set()
    run.wait()
    assert copier.asked == [9, 4, 8]
    assert run.there() == [4, 8, 9]


def test_a_step_removed_while_it_waits_is_let_go(run, copier):
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.save(2, 3)
    fastckpt.remove(run.local.path_of(2))
    copier.gate.set()
    run.wait()
    assert run.there() == [1, 3]
    assert not run.drain.holds(2)


def test_a_step_that_cannot_be_looked_at_is_not_gone(run, monkeypatch):
    monkeypatch.setattr(run.local, "identity", lambda _name: None)
    run.save(1)
    run.wait()
    assert run.there() == [1]


def test_a_look_at_a_store_misses_no_step_that_takes_the_place_of_another(tmp_path, monkeypatch):
    place = prefix.Prefix(Objects.at("test", f"memory://{tmp_path.name}/run"), NAMES)
    place.replace("step-00000001/fastckpt.json", b"{}", durable=True)
    children, turns = place._objects.children, []

    def listed():
        found = children()
        if not turns:
            turns.append(found)
            place.replace("step-00000002/fastckpt.json", b"{}", durable=True)
            place._objects.remove(["step-00000001/fastckpt.json"])
        return found

    monkeypatch.setattr(place._objects, "children", listed)
    assert place.look().steps == [2]


def test_a_look_at_a_store_misses_no_step_that_another_thread_asks_about(tmp_path, monkeypatch):
    """Another thread, such as the drain, asks during a listing. Mutant: the listing is built in the shared object."""
    place = prefix.Prefix(Objects.at("test", f"memory://{tmp_path.name}/run"), NAMES)
    names = [f"step-{step:08d}" for step in (1, 2, 3)]
    for name in names:
        place.replace(f"{name}/fastckpt.json", b"{}", durable=True)

    class Asking(Names):
        def step_of(self, name):
            for each in names:
                assert place.identity(each) is not None
            return super().step_of(name)

    monkeypatch.setattr(place, "names", Asking("step-{step:08d}"))
    assert place.look().steps == [1, 2, 3]


def test_what_was_there_takes_one_look_at_what_follows(tmp_path, copier, monkeypatch):
    run = Run(tmp_path, tmp_path / "remote", [keep.Last(9)])
    run.save(1, 2, 3)
    run.wait()
    other = Run(tmp_path, tmp_path / "remote", [keep.Last(9)])
    followed, clear = [], other.tier.clear
    monkeypatch.setattr(other.tier, "clear", lambda step: followed.append(step) or clear(step))
    other.local.pin(1)
    other.drain.resume()
    other.wait()
    assert copier.asked[-3:] == [3, 2, 1]
    assert followed == [3]
    assert other.tier.place.look().pinned == {1}


def test_what_is_damaged_replaces_nothing_at_the_remote(run):
    run.save(1)
    run.wait()
    fastckpt.save({"w": np.full(1000, 77)}, run.local.path_of(1))
    damage(run, 1)
    run.drain.add(1)
    with pytest.raises(fastckpt.exceptions.CorruptCheckpointError):
        run.wait()
    assert fastckpt.load(run.tier.place.path_of(1))["w"][0] == 1


def test_what_no_policy_of_the_remote_wants_is_skipped(tmp_path, copier):
    run = Run(tmp_path, f"memory://{tmp_path.name}/run", [keep.Last(1), keep.Steps(2)])
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.save(2, 3, 4, 5)
    run.local.pin(3)
    copier.gate.set()
    run.wait()
    assert copier.asked == [1, 5, 3, 2]
    assert run.there() == [2, 3, 5]  # the retention of the remote tier removed step 1
    assert run.tier.place.look().pinned == {3}
    # Later steps of an earlier run do not count.
    run.save(4)
    run.wait()
    assert run.there() == [2, 3, 4, 5]


@pytest.mark.parametrize("far", ["path", "memory"])
def test_a_run_that_saves_faster_than_the_remote_answers_is_copied(tmp_path, copier, monkeypatch, far):
    run = Run(tmp_path, tmp_path / "remote" if far == "path" else f"memory://{tmp_path.name}/run", [keep.Last(1)])
    look, steps = run.tier.place.look, iter(range(2, 9))

    def slowly():
        found = look()
        for step in itertools.islice(steps, 1):
            run.save(step)
        return found

    monkeypatch.setattr(run.tier.place, "look", slowly)
    run.save(1)
    run.wait()
    # The drain also copies earlier steps, and does not wait for the last one.
    assert copier.asked[0] == 1
    assert copier.asked[-1] == 8
    assert run.there() == [8]


def test_what_killed_copies_left_goes_when_nobody_wants_it(tmp_path, copier):
    run = Run(tmp_path, tmp_path / "remote", [keep.Last(1)])
    run.save(1, 2, 3, add=False)

    (tmp_path / "remote").mkdir()
    for place, step in ((run.tier.place, 1), (run.tier.place, 9), (run.local, 0)):
        manifest = Path(run.local.path_of(1), "fastckpt.json").read_bytes()
        _core.Gathering(place.path_of(step), manifest, True).close()
    new = tmp_path / "remote" / ".latest.0123456789abcdef.new"
    new.touch()
    run.drain.resume()
    run.wait()
    assert run.there() == [3]
    assert not new.exists()
    # A newer checkpoint may belong to another manager.
    assert [one.checkpoint for one in fastckpt.clean(run.tier.place.path)] == ["step-00000009"]
    assert fastckpt.clean(run.local.path) == []


FOLDER = "0123456789abcdef"


def test_what_killed_copies_left_in_a_store_goes_when_nobody_wants_it(tmp_path, copier, monkeypatch, caplog):
    """Mutants: all below the step is removed; files of another process's copy are, too; those of another host stay."""
    caplog.set_level(logging.INFO, "fastckpt")
    run = Run(tmp_path, f"memory://{tmp_path.name}/run", [keep.Last(1)])
    run.save(1, 2, add=False)
    place = run.tier.place
    objects = place._objects
    for step in (0, 1, 9):
        objects.write(f"step-0000000{step}/{FOLDER}/model.safetensors", [b"part"], 4, "0" * 16)
    for step in (0, 1):
        objects.write(f"step-0000000{step}/{FOLDER}/notes.txt", [b"mine"], 4, None)
    run.drain.resume()
    run.wait()
    assert run.there() == [2]
    # Another host saved the first step.
    left = {name for name in objects.sizes() if FOLDER in name}
    kept = {f"step-0000000{step}/{FOLDER}/notes.txt" for step in (0, 1)} | {
        f"step-0000000{step}/{FOLDER}/model.safetensors" for step in (0, 9)
    }
    assert left == kept
    monkeypatch.setattr(prefix, "_UNDER_WAY", timedelta(-1))
    run.save(3)
    run.wait()
    left = {name for name in objects.sizes() if FOLDER in name}
    assert left == kept - {f"step-00000000/{FOLDER}/model.safetensors"}
    assert "step-00000000: removed 1 objects left by an interrupted copy" in caplog.text


class Outage:
    """A store that accepts a number of changes, and then none until the ``with`` statement ends, as after a kill."""

    def __init__(self, patch, request, url, most):
        self.left = most
        self.reached = False
        if url.startswith("s3"):
            self._s3 = request.getfixturevalue("s3")
            self._s3.refuse = lambda method, _path: "403 Forbidden" if self._is_over(method) else None
            return
        for name in ("write", "replace", "remove"):
            patch.setattr(Objects, name, self._before(getattr(Objects, name)))

    def _is_over(self, method):
        if method in {"PUT", "POST", "DELETE"}:
            self.left -= 1
        self.reached = self.reached or self.left < 0
        return self.left < 0

    def _before(self, real):
        def call(*arguments):
            if self._is_over("PUT"):
                raise PermissionError(errno.EACCES, "the process was killed")
            return real(*arguments)

        return call


@pytest.mark.parametrize("again", [True, False], ids=["the same step", "the next step"])
@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_new_node_finds_the_old_step_or_the_new_one_wherever_a_drain_was_killed(
    tmp_path, request, copier, store, again
):
    """The remote tier keeps one checkpoint. Mutant: the old manifest is removed before the new one exists."""
    if store == "s3":
        request.getfixturevalue("s3")
    step = 1 if again else 2
    found, cut, reached = set(), 0, True
    while reached:
        root = tmp_path / str(cut)
        remote = f"memory://{tmp_path.name}/{cut}" if store == "memory" else f"s3://{BUCKET}/{cut}"
        run = Run(root, remote, [keep.Last(1)])
        run.save(1)
        run.wait()
        fastckpt.save({"w": np.full(1000, 7)}, run.local.path_of(step), metadata={"step": step})
        with pytest.MonkeyPatch.context() as patch:
            outage = Outage(patch, request, remote, cut)
            run.drain.add(step)
            with run.drain.hurry():
                assert run.drain.is_over(time.monotonic() + LONG)
            reached = outage.reached
            if store == "s3":
                request.getfixturevalue("s3").forget()
        restored = fastckpt.Manager(root / "node", remote=remote).restore()
        value = int(restored.state["w"][0])
        assert (restored.step, value) in {(1, 1), (step, 7)}
        found.add(value)
        # After the next process, the store has the new checkpoint, and nothing of the previous one.
        following = Run(root, remote, [keep.Last(1)])
        following.drain.resume()
        following.wait()
        assert fastckpt.verify(following.tier.place.path_of(step)).ok
        folder = manifest.own_checksum(Path(run.local.path_of(step)))
        name = NAMES.name_of(step)
        assert set(following.tier.place._objects.sizes()) == {
            *(".fastckpt-run.json", "latest", f"{name}/fastckpt.json", f"{name}/{folder}/model.safetensors"),
            f"{name}/{folder}/model.safetensors.index.json",
        }
        cut += 1
    assert found == {1, 7}
    assert cut > 4


def test_what_is_whole_in_a_store_stays_until_something_newer_is(tmp_path, copier):
    run = Run(tmp_path, f"memory://{tmp_path.name}/run", [keep.Last(1)])
    run.save(1)
    run.wait()
    copier.fail[2] = OSError(5, "no route to the store")
    run.save(2, 1, add=False)
    run.drain.add(1)
    run.drain.add(2)
    with pytest.raises(OSError, match="no route"):
        run.wait()
    # No policy would keep step 1 beside step 2, but step 2 is not there yet.
    assert copier.asked == [1, 2]
    assert run.there() == [1]


def test_steps_that_are_skipped_cost_no_request(tmp_path, s3, copier):
    """Otherwise, the drain would fall behind a trainer that saves faster than a store answers, and never copy again."""
    run = Run(tmp_path, f"s3://{BUCKET}/run", [keep.Last(1)])
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.save(*range(2, 30))
    copier.gate.set()
    run.wait()
    assert run.there() == [29]
    assert copier.asked == [1, 29]
    assert not {path for _, path, _ in s3.requests for step in range(2, 29) if NAMES.name_of(step) in path}


def test_what_is_left_is_copied_with_the_next(run, copier, caplog):
    hold(copier)
    run.save(1)
    until_begun(copier)
    run.drain.leave(0.0)
    assert "left to the next run: 1" in caplog.text
    assert run.there() == []
    assert run.drain.holds(1)
    copier.gate.set()
    run.save(2)
    run.wait()
    assert run.there() == [1, 2]


def test_a_process_that_brings_a_share_tries_once(tmp_path, copier, caplog):
    run = Run(tmp_path, tmp_path / "remote", share=(1, 2))
    copier.fail["all"] = OSError(5, "no route to the store")
    run.save(1)
    run.wait()
    assert copier.asked == [1]
    assert "did not upload its share of step 1" in caplog.text
    assert run.settled == 0
    assert not (tmp_path / "remote" / "latest").exists()


PROGRAM = """
import sys, threading, time
import numpy as np, fastckpt
from fastckpt._manager import drain
real = drain.copy_checkpoint
def copy(sources, target, **options):
    while not drain._ending:
        time.sleep(0.001)
    if sys.argv[2] == "fails":
        raise OSError(5, "no route to the store")
    while sys.argv[2] == "hangs":
        if options["stop"]():
            raise drain.CancelledError
        time.sleep(0.001)
    return real(sources, target, **options)
drain.copy_checkpoint = copy
from fastckpt._manager.directory import Directory, Names
from fastckpt._manager.remote import remote_of
from fastckpt._manager.tier import Tier
names = Names("step-{step:08d}")
local = Tier(Directory(sys.argv[1] + "/local", names), [])
fastckpt.save({"w": np.arange(10)}, local.place.path_of(1))
made = drain.Drain(
    local, remote_of(sys.argv[1] + "/remote", [], local),
    limit=None, deadline=lambda: 0.0 if sys.argv[2] == "hangs" else float("inf"),
)
made.add(1)
made.start()
"""


@pytest.mark.parametrize("case", ["works", "fails", "hangs"])
def test_a_process_that_ends_finishes_the_drain_or_leaves_it(tmp_path, case):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "remote" / "step-00000001").exists() == (case == "works")
    assert ("the process ends" in done.stderr) == (case == "fails")


def test_a_forked_child_copies_nothing(tmp_path, copier):
    hold(copier)
    with fastckpt.Manager(tmp_path / "local", remote=tmp_path / "remote") as manager:
        manager.save(1, {"w": np.ones(1000)})
        until_begun(copier)
        pid = os.fork()
        if pid == 0:
            with manager:
                pass
            # This is what the interpreter calls at exit; it would not return if it waited for the drain.
            draining._at_end()
            os._exit(manager.steps() != [1])
        end = time.monotonic() + LONG
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        assert ended == (pid, 0)
        assert not Path(tmp_path / "remote" / "step-00000001").exists()
        copier.gate.set()
    assert at_remote(manager) == [1]
