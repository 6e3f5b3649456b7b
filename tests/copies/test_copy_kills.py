"""A copy to a directory is killed at any of its system calls: the target is old or new, and the next copy continues."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import fastckpt
from copies.conftest import value_at
from harness import strace, zygote
from harness.draws import one_in

#: All system calls that change names in a copy or make them durable.
CALLS = "mkdirat,linkat,unlinkat,renameat,renameat2,rename,fsync,fdatasync"


def attempt(children, log: Path, source: str, target: str, *inject: str) -> list[strace.Call]:
    """Copy in a child, which may be killed; return its system calls."""
    child = children.start("copies.jobs:copy_held", source=source, target=target)
    assert child.next() == "ready"
    with strace.attached(child.pid, log, CALLS, *inject) as trace:
        child.go()
        try:
            end = child.outcome()
            assert not isinstance(end, zygote.Raised), end
        except zygote.DiedError:
            assert inject
        return trace.calls()


@pytest.mark.timeout(600)
def test_killed_at_any_call_it_is_old_or_new_and_the_next_one_goes_on(children, saved, tmp_path):
    """Mutants: the copy is published before all files are there; a file gets its name before the sync; no resume."""
    source, target = saved("a", 1), str(tmp_path / "b")
    before = str(tmp_path / "before")
    fastckpt.copy(saved("c", 2), target)
    fastckpt.copy(target, before)
    calls = attempt(children, tmp_path / "log", source, target)
    assert value_at(target) == 1
    _check_order(calls, target)
    # strace counts the calls of each thread separately.
    most = Counter((call.name, call.pid) for call in calls)
    reused = set()
    for (name, _), count in most.items():
        for when in range(1, count + 1, one_in(2)):
            fastckpt.copy(before, target, overwrite=True)
            attempt(children, tmp_path / "log", source, target, strace.injection(name, "signal=SIGKILL", when))
            assert value_at(target) in (1, 2)
            again = fastckpt.copy(source, target, overwrite=True)
            reused.add(0 if again.was_there else again.reused_bytes)
            assert value_at(target) == 1
    # Only a copy that was killed right after its commit leaves files, which the next save sweeps.
    fastckpt.save({}, tmp_path / "last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "before", "c", "last", "log"]
    # Some copies were killed with no whole shard, some with three whole shards.
    (size,) = {path.stat().st_size for path in Path(source).glob("*.safetensors")}
    assert {0, 3 * size} <= reused <= {0, size, 2 * size, 3 * size}


def _check_order(calls: list[strace.Call], target: str) -> None:
    """Check that each file is synced before it gets its name, and that all have names before the target changes."""
    place = re.compile(rf"{re.escape(str(Path(target).parent))}/\.b\.copy-[0-9a-f]{{16}}")
    named = [call for call in calls if call.name.startswith("rename") and call.ok and place.match(call.paths()[0])]
    named = [call for call in named if call.paths()[0].endswith(".part")]
    assert len(named) == 5
    synced = {path: call for call in calls if "sync" in call.name and call.ok for path in call.fd_paths()}
    for call in named:
        assert synced[call.paths()[0]].end < call.start
    commit = next(call for call in calls if call.name.startswith("rename") and call.paths()[1:] == [target])
    assert max(call.end for call in named) < commit.start
    gone = next(call for call in calls if call.name.startswith("rename") and place.fullmatch(call.paths()[0]))
    assert commit.end < gone.start
