"""The simulation itself: the disk loses only data that it may lose, and each mistake in a record is found. A row of the
campaign (``rows/r04_simulated.py``) and ``python -m tests.faults.simulated_command`` draw states."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from faults import simulated
from faults.row import DISTINCT
from faults.rows.r04_simulated import NAME
from faults.simulated_command import Campaign
from faults.simulated_disk import ROOT, Disk, Make, Names, Reboot, Size, Sync, Write
from faults.simulated_mutants import MUTANTS, Catcher
from faults.simulated_programs import draw_program
from faults.simulated_reader import Reader
from harness import needs

#: Power cuts of each program here, and how often a state of the small disks below is drawn.
CUTS, DRAWN = 120, 300
FILE, FOLDER, OTHER = 2, 3, 4


@pytest.fixture(scope="module")
def stage():
    needs.root()
    if not Path("/dev/fuse").exists():
        needs.missing("needs /dev/fuse (modprobe fuse)")
    with simulated.stage() as made:
        yield made


def trees(*operations):
    """Return all observed states after a power cut."""
    disk, draw = Disk(), random.Random(1)
    for operation in operations:
        disk.apply(operation)
    return [dict(each) for each in {tuple(sorted(disk.crash(draw).tree.items())) for _ in range(DRAWN)}]


MADE = (Make(FILE, False), Names(((ROOT, "a", FILE),)), Write(FILE, 0, b"x"))


def test_bytes_and_names_are_lost_apart():
    assert sorted(map(str, trees(*MADE))) == ["{'a': b''}", "{'a': b'x'}", "{}"]
    assert sorted(map(str, trees(*MADE, Sync(FILE)))) == ["{'a': b'x'}", "{}"]
    assert sorted(map(str, trees(*MADE, Sync(ROOT)))) == ["{'a': b''}", "{'a': b'x'}"]
    assert trees(*MADE, Sync(FILE), Sync(ROOT)) == [{"a": b"x"}]


def test_pages_are_lost_one_by_one_and_a_page_as_a_whole():
    long = Write(FILE, 0, b"1" * 5000)
    found = {each["a"] for each in trees(*MADE, Sync(FILE), Sync(ROOT), Size(FILE, 5000), Sync(FILE), long)}
    first, second, zeros = b"1" * 4096, b"1" * 904, bytes(904)
    assert found == {first + second, first + zeros, b"x" + bytes(4095) + second, b"x" + bytes(4999)}


def test_a_rename_is_whole_or_lost_and_stands_on_the_one_before():
    there = (*MADE, Sync(FILE), Sync(ROOT))
    moved, again = Names(((ROOT, "a", 0), (ROOT, "b", FILE))), Names(((ROOT, "b", 0), (ROOT, "c", FILE)))
    assert sorted(next(iter(each)) for each in trees(*there, moved, again)) == ["a", "b", "c"]
    # A sync of a directory includes changes elsewhere on which its names depend.
    folders = [Make(FOLDER, True), Names(((ROOT, "d", FOLDER),)), Sync(ROOT)]
    across = Names(((ROOT, "a", 0), (FOLDER, "a", FILE)))
    assert trees(*there, *folders, across, Sync(FOLDER)) == [{"d": None, "d/a": b"x"}]
    exchanged = [Make(OTHER, True), Names(((ROOT, "e", OTHER),)), Sync(ROOT)]
    both = Names(((ROOT, "d", OTHER), (ROOT, "e", FOLDER)))
    disk = Disk()
    for operation in (*folders, *exchanged, both):
        disk.apply(operation)
    for seed in range(20):
        assert sorted(disk.crash(random.Random(seed)).folders[ROOT].values()) == [FOLDER, OTHER]


def test_a_power_cut_makes_all_that_is_left_durable():
    left = Reboot({FILE: b"y"}, {ROOT: {"a": FILE}})
    assert trees(*MADE, left) == [{"a": b"y"}]


def test_a_seed_gives_one_program_one_record_and_the_same_states(stage):
    seed = "7-1"
    program = draw_program(seed, kind="saves")
    assert program == draw_program(seed, kind="saves")
    for phase in program["phases"]:
        # Concurrent or killed threads may take turns in another order.
        phase |= {"kill": None, "reboot": None}
        for act in phase["acts"]:
            if act[0] == "save":
                act[3]["background"] = False
    records = [stage.record(program, seed) for _ in range(2)]
    one, other = [[told(each) for each in record] for record in records]
    assert one == other
    reader = Reader(stage.place)
    first, second = [simulated.explore(records[0], program, reader, seed, 50) for _ in range(2)]
    assert first == second
    assert first.drawn == 50
    assert first.states > 10


def told(operation):
    """Return the reproducible part: numbers of nodes, names of workspaces and times in the manifest vary."""
    names = re.findall(r"'(\.?[a-z][^'-]*)", str(operation)) if isinstance(operation, Names) else []
    return type(operation).__name__, names, getattr(operation, "at", 0)


@pytest.mark.root
def test_a_run_that_has_gone_back_stays_there(stage):
    """The newer checkpoint is pinned: then nothing is removed, and no removal syncs the directory."""
    act = {"keep": 2, "background": False, "each": True, "remote": False}
    saves = act | {"first": 0, "saves": 2, "back": None, "pin": 2}
    back = act | {"first": 100, "saves": 0, "back": [2, True], "pin": None}
    phases = [{"acts": [["manager", "run", each]], "kill": None, "reboot": None} for each in (saves, back)]
    program = draw_program("1-1", kind="manager") | {"phases": phases}
    found = simulated.explore(stage.record(program, "1-1"), program, Reader(stage.place), "1-1", CUTS)
    assert found.wrong == []


def test_a_campaign_that_goes_on_writes_what_it_has_now(tmp_path):
    block = {"programs": 1, "operations": 2, "drawn": 3, "states": 2, "saved over": 1, "violations": []}
    for number in range(2):
        campaign = Campaign(tmp_path / "found.json", seed=1, each=600)
        campaign.found["blocks"][str(number)] = block
        campaign.write()
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    (part,) = found["parts"][NAME]
    assert (found["drawn"], part["trials"], part["details"]) == (6, 6, {DISTINCT: 4})


@pytest.fixture(scope="module")
def catcher(stage):
    return Catcher(stage, 1)


@pytest.mark.root
@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_is_found(catcher, name):
    assert catcher.caught(name)
