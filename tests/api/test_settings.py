"""The options of saves: defined once, shown by each function that takes them, checked before the state is looked at."""

from __future__ import annotations

import enum
import inspect
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import dcp, distributed
from fastckpt._api.build_report import build_report
from fastckpt._api.load_settings import LoadSettings
from fastckpt._api.reports import LoadReport
from fastckpt._api.save_settings import SaveSettings, WriteSettings
from fastckpt._api.settings import Settings, with_lines
from fastckpt._background.settings import BackgroundSettings
from fastckpt._ranks.replicas import Policy

RECORDS = [WriteSettings, SaveSettings, BackgroundSettings, Policy, LoadSettings]
#: What takes which options, and how it saves.
DOORS = {
    "save": (fastckpt.save, [SaveSettings]),
    "save_async": (fastckpt.save_async, [BackgroundSettings, SaveSettings]),
    "distributed.save": (distributed.save, [Policy, SaveSettings]),
    "distributed.save_async": (distributed.save_async, [BackgroundSettings, Policy, SaveSettings]),
    "dcp.Writer": (dcp.Writer, [WriteSettings, Policy]),
    "load": (fastckpt.load, [LoadSettings]),
    "distributed.load": (distributed.load, [LoadSettings]),
}


ALONE = {"save", "save_async"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_type_checkers_see_the_options_of_the_record(record):
    assert record.given.__annotations__.keys() == record.options().keys()


@pytest.mark.parametrize("door", DOORS)
def test_help_shows_every_option(door):
    function, records = DOORS[door]
    parameters = inspect.signature(function).parameters
    assert not [name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD]
    named = function.__init__ if isinstance(function, type) else function
    hints = typing.get_type_hints(named)
    for record in records:
        for name, one in record.options().items():
            assert parameters[name].default == one.default
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert name in hints
            assert parameters[name].annotation == hints[name]
            assert f"\n    {name}: " in inspect.getdoc(function)
    assert "{options}" not in function.__doc__
    of_ranks = any(one.alike for record in records for one in record.options().values()) and door not in ALONE
    assert ("The same on all ranks." in function.__doc__) == of_ranks
    assert all(len(line) <= 120 for line in function.__doc__.splitlines())


@pytest.mark.parametrize("door", DOORS)
def test_an_argument_that_there_is_not_is_an_error_with_what_there_is(door, tmp_path):
    function, _ = DOORS[door]
    loads = "load" in door
    arguments = (tmp_path / "c",) if loads or isinstance(function, type) else ({"w": torch.ones(1)}, tmp_path / "c")
    for like in ("strict", "report") if loads else ("overwrite", "metadata"):
        name = like[:-1]
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; there are '{like}'"):
            function(*arguments, **{name: True})
    assert not (tmp_path / "c").exists()


def test_a_record_is_checked_once_and_does_not_change():
    settings = SaveSettings.of("save", {"shard_size": "1MB", "frozen": "a.*", "bandwidth_limit": "2GB"})
    assert (settings.shard_size, settings.frozen, settings.bandwidth_limit) == (1_000_000, ("a.*",), 2_000_000_000)
    with pytest.raises(AttributeError):
        settings.shard_size = 1


@pytest.mark.parametrize("indent", ["", "        "], ids=["from Python 3.13 on", "before"])
def test_a_docstring_gets_the_options_where_it_says_so(indent):
    doc = f"Save.\n\n{indent}state: it.\n{indent}{{options}}\n\n{indent}Returns: none.\n"
    made = with_lines(doc, ["one: " + "word " * 30, "two: short."])
    assert made.splitlines()[3].startswith(f"{indent}one: word")
    assert made.splitlines()[4].startswith(f"{indent}    word")
    assert made.splitlines()[5:] == [f"{indent}two: short.", "", f"{indent}Returns: none."]


class Word(str, enum.Enum):
    BUFFERED = "buffered"
    FULL = "full"
    WARN = "warn"


def test_a_member_of_an_enum_of_texts_is_its_text():
    assert SaveSettings.of("save", {"io": Word.BUFFERED}).io == "buffered"
    policy = Policy.of("save", {"replicas": Word.FULL, "on_difference": Word.WARN})
    assert [type(text) for text in (policy.replicas, policy.on_difference)] == [str, str]
    assert (policy.replicas, policy.on_difference) == ("full", "warn")


def test_what_is_written_needs_no_functions_of_the_program():
    settings = SaveSettings.of(
        "save", {"default": list, "registry": fastckpt.Registry(), "exclude": "a", "dtype": "half"}
    )
    kept = settings.for_writing()
    assert (kept.default, kept.registry, kept.exclude, kept.dtype) == (None,) * 4
    assert (kept.shard_size, kept.io) == (settings.shard_size, settings.io)


def test_a_report_has_every_phase_in_its_order():
    core = {"phases": {"exchange": 1.0, "plan": 2.0, "read": 3.0, "another": 4.0}, "seconds": 10.0}
    figures = {"bytes": 0, "threads": 1, "engine": "uring", "fallback": None, "blocks": {}, "paths": {}, "copied": 0}
    began = time.perf_counter() - 20
    report = build_report(LoadReport, "/c", began, {**core, **figures, "shards": 0, "tensors": 0}, beside={"wait": 5.0})
    assert list(report.phases) == ["wait", "plan", "read", "exchange", "another"]
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert report.phases["plan"] == pytest.approx(report.seconds - 13)


ADDED = """
    tag: str | None = option(None, as_given, "a made-up option.", alike=True)

    def core("""
CALLS = """
import sys, torch, fastckpt, torch.distributed.checkpoint as tdcp
from fastckpt import dcp, distributed
from fastckpt._api import save_settings

said, core = [], save_settings.WriteSettings.core
save_settings.WriteSettings.core = lambda self, **more: (said.append(self.tag), core(self, **more))[1]
state, path = {"w": torch.ones(3)}, sys.argv[1]
calls = {
    "save": lambda: fastckpt.save(state, path, tag="save"),
    "save_async": lambda: fastckpt.save_async(state, path, tag="save_async").result(),
    "distributed.save": lambda: distributed.save(state, path, tag="distributed.save"),
    "distributed.save_async": lambda: distributed.save_async(state, path, tag="distributed.save_async").result(),
    "dcp.Writer": lambda: tdcp.save(state, storage_writer=dcp.Writer(path, tag="dcp.Writer"), no_dist=True),
    "Manager": lambda: fastckpt.Manager(path + "-run", save_options={"tag": "Manager"}).save(1, state),
}
for name, call in calls.items():
    call()
    assert set(said) == {name}, (name, said)
    said.clear()
assert "tag: a made-up option." in fastckpt.save.__doc__
"""


def test_an_option_is_added_in_one_file(tmp_path):
    """To a copy of the package: one line for type checkers, and the option itself. Every save takes it."""
    package = tmp_path / "fastckpt"
    shutil.copytree(Path(fastckpt.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "_api" / "save_settings.py"
    text = file.read_text(encoding="utf-8")
    text = text.replace("    overwrite: bool\n", "    overwrite: bool\n    tag: str | None\n", 1)
    file.write_text(text.replace("\n    def core(", ADDED, 1), encoding="utf-8")
    command = [sys.executable, "-W", "error::UserWarning:fastckpt", "-c", CALLS, str(tmp_path / "c")]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_record_is_tried_here():
    def below(kind):
        return {kind.__name__}.union(*(below(one) for one in kind.__subclasses__()))

    assert below(Settings) - {Settings.__name__} == {record.__name__ for record in RECORDS}
