"""Scenarios of two machines that share a file system. Each gets two pairs ``(children, directory)``, whose directories
are the same, and one for logs. test_nfs.py runs them in a user-mode Linux, test_fuse.py on two mounts of a directory.

If the order matters, the scenario stops a saver before a system call, instead of racing it.
"""

# ruff: noqa: PTH208 - names as the kernel has them

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal

from harness import machines, strace, zygote
from harness.jobs import SMALL

SHARDS = {"nbytes": SMALL, "shard_size": SMALL // 2, "io": "threads"}
READERS = ("load", "mmap", "open", "verify", "info")
# The calls before which a saver is stopped and killed: during its writes, and throughout the commit.
POINTS = (
    ("fdatasync", (1,)),
    ("renameat", (1, 2, 3)),
    ("fsync", (3,)),
    ("unlinkat", (1,)),
)


def save(children, path, index, **options):
    end = children.run("save_now", path=str(path), index=index, **{"nbytes": SMALL, **options})
    assert end is None, end


def look(children, path, operation="load"):
    return children.run("look", path=str(path), operation=operation)


def told(child):
    """None if the child's save succeeded, or its exception."""
    end = child.outcome()
    return end if isinstance(end, zygote.Raised) else None


def tidy(directory, *names):
    """Wait until the directory has only these names, which a client may notice late."""
    try:
        machines.wait_until(lambda: sorted(os.listdir(directory)) == sorted(names), 10)
    except AssertionError:
        raise AssertionError(f"the directory has {sorted(os.listdir(directory))}, not {sorted(names)}") from None


def contend(one, two, names):
    """Both machines save ten times at once; all saves must succeed. The last states are 18 and 19."""
    children = [
        machine.start("contend", path=str(place / name), first=number, step=2, count=10, **SHARDS)
        for number, ((machine, place), name) in enumerate(zip((one, two), names, strict=True))
    ]
    for child in children:
        child.next()
    for child in children:
        child.go()
    ends = [child.outcome() for child in children]
    failed = [end for all_of_one in ends for end in all_of_one if end[1] != "saved"]
    assert not failed, f"{len(failed)} of 20 saves failed: {failed[:3]}"


def different_names(one, two, logs):
    """Two savers use different names in one parent: no save takes the other's files for a leftover."""
    contend(one, two, ["of-0", "of-1"])
    assert [look(two[0], two[1] / "of-0"), look(one[0], one[1] / "of-1")] == [18, 19]
    tidy(one[1], "of-0", "of-1")
    tidy(two[1], "of-0", "of-1")


def one_name(one, two, logs):
    """Two savers use one name: each save succeeds, and the last checkpoint and a foreign file are there."""
    save(one[0], one[1] / "step", 1000)
    (one[1] / "step" / "config.json").write_text("mine")
    contend(one, two, ["step", "step"])
    found = [look(machine, place / "step") for machine, place in (one, two)]
    assert found in ([18, 18], [19, 19]), found
    assert [(place / "step" / "config.json").read_text() for _, place in (one, two)] == ["mine"] * 2
    save(one[0], one[1] / "step", 2000)
    tidy(one[1], "step")
    tidy(two[1], "step")


def readers_beside_a_saver(one, two, logs):
    """A reader gets a whole checkpoint in every way of reading while another machine saves over it."""
    save(one[0], one[1] / "step", 0, **SHARDS)
    reader = two[0].start("look_until_told", path=str(two[1] / "step"), operations=READERS)
    reader.next()
    assert one[0].run("save_repeatedly", path=str(one[1] / "step"), count=20, **SHARDS) is None
    reader.go()
    seen = reader.outcome()
    assert isinstance(seen, dict), seen
    assert not seen["ill"], seen
    assert look(two[0], two[1] / "step") == 20
    tidy(two[1], "step")


def stopped_but_alive(one, two, logs):
    """A stopped saver is not dead: no other save removes its files."""
    for name in ("mine", "other"):
        with machines.stopped_save(one[0], one[1] / "mine", logs / "log", "fdatasync") as child:
            save(two[0], two[1] / name, 7)
            left = [entry for entry in os.listdir(one[1]) if ".tmp-" in entry]
            assert len(left) == 1, os.listdir(one[1])
        assert (end := told(child)) is None, end
        assert look(two[0], two[1] / "mine") == 1
    tidy(one[1], "mine", "other")


def killed(one, two, logs):
    """A saver is killed before any call: the other machine finds the whole old or new one, and sweeps leftovers."""
    hits = 0
    for call, turns in POINTS:
        for when in turns:
            path = one[1] / "step"
            save(one[0], path, 1, **SHARDS)
            child = one[0].start("save_held", path=str(path), index=2, threads=1, **SHARDS)
            child.next()
            with strace.stopping(child.pid, logs / "log", call, when) as stop:
                child.go()
                machines.wait_until(lambda stop=stop, child=child: stop.reached() or child.ended())
                hit = stop.reached()
                child.signal(signal.SIGKILL)
            child.wait()
            hits += hit
            if not hit:
                break
            where = f"{call} {when}: {os.listdir(one[1])}"
            for machine, place in (two, one):
                found = look(machine, place / "step")
                assert found in (1, 2), f"{where}: {found}"
            save(two[0], two[1] / "step", 3, **SHARDS)
            assert look(one[0], path) == 3, where
            tidy(one[1], "step")
            tidy(two[1], "step")
    assert hits >= 5, f"a saver was stopped only {hits} times"


def killed_and_not_swept(one, two, logs):
    """Leftovers stay, and do no harm, while only their own machine can prove the saver's death: it sweeps them."""
    path = one[1] / "step"
    save(one[0], path, 1)
    with machines.stopped_save(one[0], path, logs / "log", "fdatasync", index=2) as child:
        child.signal(signal.SIGKILL)
    child.wait()
    save(two[0], two[1] / "step", 3)
    assert len([name for name in os.listdir(two[1]) if ".tmp-" in name]) == 1, os.listdir(two[1])
    assert look(one[0], path) == 3
    save(one[0], path, 4)
    tidy(two[1], "step")


def removed_by_its_owner(one, two, logs):
    """If a saver dies during its clean-up, its leftovers do not come back when the user removes the checkpoint."""
    for call, when in (("unlinkat", 1), ("unlinkat", 2), ("unlinkat", 3)):
        path = one[1] / "step"
        save(one[0], path, 1, **SHARDS)
        with machines.stopped_save(one[0], path, logs / "log", call, when, index=2, **SHARDS) as child:
            child.signal(signal.SIGKILL)
        child.wait()
        assert look(one[0], path) == 2
        shutil.rmtree(path)
        for machine, place in (one, two):
            found = look(machine, place / "step")
            assert isinstance(found, zygote.Raised), f"{call} {when}: state {found} is back"
            assert found.kind == "FileNotFoundError", found
        save(two[0], two[1] / "step", 3)
        assert look(one[0], path) == 3
        shutil.rmtree(path)
        # Leftovers of another machine may have to wait for that machine's next save.
        save(one[0], one[1] / "other", 4)
        tidy(one[1], "other")
        shutil.rmtree(one[1] / "other")


def stopped_between_two_renames(one, two, logs):
    """A reader puts the old checkpoint back if the saver takes too long; then the saver checks again."""
    path = one[1] / "step"
    save(one[0], path, 1)
    call = second_rename(one, logs)
    with machines.stopped_save(one[0], path, logs / "log", *call, index=2) as child:
        assert min(os.listdir(one[1])).startswith(".step.old-"), os.listdir(one[1])
        assert (found := look(two[0], two[1] / "step")) == 1, found
    assert (end := told(child)) is None, end
    assert look(two[0], two[1] / "step") == 2
    tidy(two[1], "step")


def aside_meanwhile(one, two, logs):
    """A checkpoint that was moved aside vanishes while another machine's saver examines it; the saver checks again."""
    path = one[1] / "step"
    save(one[0], path, 1)
    call = second_rename(one, logs)
    rival = two[0].start("save_held", path=str(two[1] / "step"), index=3, nbytes=SMALL, threads=1)
    rival.next()
    with contextlib.ExitStack() as held:
        with machines.stopped_save(one[0], path, logs / "log", *call, index=2) as child:
            (aside,) = [name for name in os.listdir(two[1]) if name.startswith(".step.old-")]
            stop = strace.stopping(rival.pid, logs / "rival", "getdents64", path=two[1] / aside)
            stopped = held.enter_context(stop)
            rival.go()
            stopped.wait()
        assert (end := told(child)) is None, end
    assert (end := told(rival)) is None, end
    assert [look(machine, place / "step") for machine, place in (one, two)] == [3, 3]
    tidy(one[1], "step")


def second_rename(machine, logs):
    """The call by which the new checkpoint gets the name that the old one has left."""
    return call_of_a_save(machine, logs, "rename,renameat,renameat2", lambda call, path: call.paths()[1:] == [path])


def call_of_a_save(machine, logs, names, wanted):
    """Name and number of the first wanted call of a save over a checkpoint; strace counts by thread and name."""
    path = machine[1] / "probe"
    save(machine[0], path, 1, **SHARDS)
    child = machine[0].start("save_held", path=str(path), index=2, threads=1, **SHARDS)
    child.next()
    with strace.attached(child.pid, logs / "probe", names) as trace:
        child.go()
        assert told(child) is None
        calls = trace.calls()
    shutil.rmtree(path)
    counts = {}
    for call in calls:
        counter = (call.pid, call.name)
        counts[counter] = counts.get(counter, 0) + 1
        if call.ok and wanted(call, str(path)):
            return call.name, counts[counter]
    raise AssertionError(calls)


def emptied_meanwhile(one, two, logs):
    """A saver examines a checkpoint that it or another machine's saver moved aside. Meanwhile the checkpoint loses its
    name and its manifest, as in a removal. The save must not fail because of this."""
    path = one[1] / "step"

    def empty():
        (name,) = [name for name in os.listdir(two[1]) if name.startswith(".step.old-")]
        (two[1] / name).rename(two[1] / "elsewhere")
        (two[1] / "elsewhere" / "fastckpt.json").unlink()

    save(one[0], path, 1, **SHARDS)
    call = second_rename(one, logs)
    rival = two[0].start("save_held", path=str(two[1] / "step"), index=3, threads=1, **SHARDS)
    rival.next()
    with contextlib.ExitStack() as held:
        with machines.stopped_save(one[0], path, logs / "log", *call, index=2, **SHARDS) as child:
            (aside,) = [name for name in os.listdir(two[1]) if name.startswith(".step.old-")]
            # The first open of the manifest finds the checkpoint that was moved aside, the second one examines it.
            stop = strace.stopping(rival.pid, logs / "rival", "openat2", 2, path=two[1] / aside)
            stopped = held.enter_context(stop)
            rival.go()
            stopped.wait()
            empty()
        assert (end := told(child)) is None, end
    assert (end := told(rival)) is None, end
    assert [look(machine, place / "step") for machine, place in (one, two)] == [3, 3]
    shutil.rmtree(two[1] / "elsewhere")

    call = call_of_a_save(one, logs, "openat2", lambda call, _: ".probe.old-" in call.fd_paths()[0])
    with machines.stopped_save(one[0], path, logs / "log", *call, index=4, **SHARDS) as child:
        empty()
    assert (end := told(child)) is None, end
    assert [look(machine, place / "step") for machine, place in (one, two)] == [4, 4]
    shutil.rmtree(two[1] / "elsewhere")
    tidy(one[1], "step")


def rival_meanwhile(one, two, logs):
    """Another saver commits between a saver's check and its rename: a file added since then is not lost."""
    path = one[1] / "step"
    save(one[0], path, 1)
    (path / "config.json").write_text("mine")
    with machines.stopped_save(one[0], path, logs / "log", "renameat2", index=2) as child:
        save(two[0], two[1] / "step", 3)
        (two[1] / "step" / "late.json").write_text("mine too")
    assert (end := told(child)) is None, end
    assert look(two[0], two[1] / "step") == 2
    assert [(path / name).read_text() for name in ("config.json", "late.json")] == ["mine", "mine too"]
    tidy(one[1], "step")


def directory_meanwhile(one, two, logs):
    """Between check and rename, the user moves the checkpoint away and puts a directory in its place: neither is
    harmed. A directory that a save may fill is filled; any other stays, and the save raises."""
    for deep in (True, False):
        # The names differ, because a client may cache a removed name for half a minute.
        name, moved = f"step-{deep}", f"moved-{deep}"
        path, other = one[1] / name, two[1] / name
        save(one[0], path, 1)
        with machines.stopped_save(one[0], path, logs / "log", "renameat2", index=2) as child:
            other.rename(two[1] / moved)
            thesis = other / "chapters" / "thesis.txt" if deep else other / "thesis.txt"
            thesis.parent.mkdir(parents=True)
            thesis.write_text("the only copy")
        end = told(child)
        assert look(two[0], two[1] / moved) == 1, os.listdir(two[1] / moved)
        assert thesis.exists(), f"{end}: {os.listdir(two[1])}, {os.listdir(other)}"
        assert thesis.read_text() == "the only copy"
        if deep:
            assert end is not None, "the save replaced a directory that it must keep"
            assert end.kind == "FileExistsError", end
        else:
            assert end is None, end
            assert look(two[0], other) == 2
    tidy(one[1], "moved-False", "moved-True", "step-False", "step-True")


def moved_meanwhile(one, two, logs):
    """Between check and rename, the user moves the checkpoint away and another saver saves: the moved one is whole."""
    path = one[1] / "step"
    save(one[0], path, 1)
    with machines.stopped_save(one[0], path, logs / "log", "renameat2", index=2) as child:
        (two[1] / "step").rename(two[1] / "moved")
        save(two[0], two[1] / "step", 3)
        (two[1] / "step" / "config.json").write_text("mine")
    assert (end := told(child)) is None, end
    assert look(two[0], two[1] / "moved") == 1, os.listdir(two[1] / "moved")
    assert look(two[0], two[1] / "step") == 2
    assert (two[1] / "step" / "config.json").read_text() == "mine"
    tidy(one[1], "moved", "step")


def failing_commit(one, two, logs):
    """A save that fails in its commit leaves nothing, not even an open file under another name."""
    path = one[1] / "step"
    save(one[0], path, 1)
    call, when = second_rename(one, logs)
    child = one[0].start("save_held", path=str(path), index=2, nbytes=SMALL)
    child.next()
    fault = strace.injection(call, "error=EACCES", when)
    with strace.attached(child.pid, logs / "log", call, fault):
        child.go()
        end = told(child)
    assert end is not None
    assert end.errno == 13, end
    assert look(two[0], two[1] / "step") == 1
    tidy(one[1], "step")


def swept_before_its_lock(one, two, logs):
    """A saver that has created its manifest but not locked it looks dead. It makes the files again that are removed."""
    probe = one[1] / "probe"
    child = one[0].start("save_held", path=str(probe), index=1, nbytes=SMALL, threads=1)
    child.next()
    with strace.attached(child.pid, logs / "probe", "fcntl") as trace:
        child.go()
        assert told(child) is None
        calls = [call.arguments for call in trace.calls() if call.name == "fcntl"]
    shutil.rmtree(probe)
    when = next(number for number, arguments in enumerate(calls, 1) if "F_OFD_SETLK" in arguments)
    with machines.stopped_save(one[0], one[1] / "step", logs / "log", "fcntl", when, index=2) as child:
        assert len(os.listdir(one[1])) == 1
        save(two[0], two[1] / "other", 3)
    assert (end := told(child)) is None, end
    assert look(two[0], two[1] / "step") == 2
    tidy(one[1], "other", "step")


def swept_in_the_middle(one, two, logs):
    """A saver is stopped before its commit while another saver sweeps, which is stopped within its sweep, if it
    gets there: the first saver commits everything."""
    path = one[1] / "mine"
    save(one[0], path, 1, **SHARDS)
    with contextlib.ExitStack() as second:
        with machines.stopped_save(one[0], path, logs / "first", "renameat2", index=2, **SHARDS) as child:
            other = two[0].start("save_held", path=str(two[1] / "other"), index=3, nbytes=SMALL)
            other.next()
            stop = second.enter_context(strace.stopping(other.pid, logs / "second", "unlinkat", 2))
            other.go()
            machines.wait_until(lambda: stop.reached() or other.ended())
        end = told(child)
    assert (rival := told(other)) is None, rival
    found = look(two[0], two[1] / "mine")
    assert end is None, f"{end}; the path holds {found}"
    assert found == 2, found
    tidy(one[1], "mine", "other")


def loader_overtaken(one, two, logs):
    """Run `reader_overtaken` with two operations only, for a slow file system."""
    reader_overtaken(one, two, logs, ("load", "verify"))


def reader_overtaken(one, two, logs, operations=READERS):
    """A reader that is stopped before any of its opens while the checkpoint is replaced starts over."""
    path = one[1] / "step"
    index = 0
    save(one[0], path, index)
    for operation in operations:
        hits = 0
        for call in ("open", "openat", "openat2"):
            for when in itertools.count(1):
                reader = two[0].start("look", path=str(two[1] / "step"), operation=operation, held=True)
                reader.next()
                with strace.stopping(reader.pid, logs / "log", call, when, path=two[1] / "step") as stop:
                    reader.go()
                    machines.wait_until(lambda stop=stop, reader=reader: stop.reached() or reader.ended())
                    if hit := stop.reached():
                        index += 1
                        save(one[0], path, index)
                end = reader.outcome()
                assert isinstance(end, int), f"{operation} stopped at its {call} {when}: {end}"
                if operation in ("load", "mmap"):
                    assert end in (index, index - 1), (operation, call, when, end, index)
                if not hit:
                    break
                hits += 1
        assert hits >= 2, f"{operation} was stopped only {hits} times"
    tidy(one[1], "step")
