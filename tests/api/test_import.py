"""The cost of the import, and modules that it must not import."""

from __future__ import annotations

import compileall
import dataclasses
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path

import fastckpt
from harness import needs, programs, surface, zygote


def child(code, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=zygote.environment(),
    )
    return done.stdout


def test_import_time(record_property):
    """The import takes less CPU time than NumPy's; the milliseconds are only reported.

    It takes half of NumPy's time, and up to four fifths on a machine with ten other processes per core. The test
    compares the fastest rounds of both, and runs more rounds while the import seems too slow.
    """
    code = (
        "from time import process_time as t; a = t(); import numpy; b = t(); import fastckpt; c = t(); "
        "print(b - a, c - b)"
    )
    # The modules are compiled once, as in an installation, and not at every import.
    compileall.compile_dir(fastckpt.__path__[0], quiet=2)
    rounds, share = [], 1.0
    while len(rounds) < 5 or (share >= 1 and len(rounds) < 30):
        rounds.append(tuple(map(float, child(code).split())))
        numpy, ours = map(min, zip(*rounds, strict=True))
        share = ours / numpy
    record_property("milliseconds of CPU, without numpy's", ours * 1e3)
    record_property("milliseconds of CPU, numpy's", numpy * 1e3)
    assert share < 1, rounds


def test_import_brings_nothing_heavy():
    heavy = ["torch", "tqdm", "hashlib", "zoneinfo", "difflib", "ml_dtypes", "safetensors", "transformers", "asyncio"]
    code = (
        "import sys, json, numpy; before = set(sys.modules); import fastckpt; "
        f"print(json.dumps([m for m in {heavy} if m in set(sys.modules) - before]))"
    )
    assert json.loads(child(code)) == []


def test_numpy_states_never_import_torch(tmp_path):
    code = f"""
import sys, datetime, numpy, fastckpt
path = {str(tmp_path / "c")!r}
state = {{"n": numpy.arange(5.0), "t": numpy.ones((3, 2)).T, "x": [1, {{2: datetime.date(2020, 1, 1)}}]}}
state["b"] = b"x" * 5000
fastckpt.save(state, path, metadata={{"step": 1}})
assert (fastckpt.load(path)["n"] == state["n"]).all()
fastckpt.load(path, into=state)
fastckpt.load(path, keys="n")
fastckpt.verify(path)
with fastckpt.open(path) as checkpoint:
    checkpoint.metadata, checkpoint.structure, checkpoint["n"], checkpoint.tensor("t")[0]
try:
    fastckpt.save(object(), path)
except fastckpt.exceptions.UnsupportedTypeError:
    pass
assert "torch" not in sys.modules
"""
    child(code, "-W", "error")


def test_the_public_surface_is_as_written_down():
    """Review shows any change of a name or signature. ``harness/surface.py`` describes how to write the file anew."""
    needs.package("torch")
    assert surface.text() == Path(__file__).with_name("surface.txt").read_text(encoding="utf-8")
    assert len(surface.public(fastckpt)) <= 30


def test_no_signature_is_long():
    """docs/names.md gives the reasons for the exceptions."""
    needs.package("torch")
    found = dict(surface.documented())
    for name, kind in [pair for pair in found.items() if inspect.isclass(pair[1])]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        found |= {f"{name}.{key}": method for key, method in methods if not key.startswith("_")}
    counts = {name: len(inspect.signature(one).parameters) for name, one in found.items()}
    assert {name for name, count in counts.items() if count > 12} == {"fastckpt.tools.plan", "fastckpt.IO"}
    assert counts["fastckpt.IO"] == 13
    assert counts["fastckpt.Manager.save"] > 1


def test_public_names():
    assert {*fastckpt.__all__} <= {*dir(fastckpt), "__version__"}
    assert all(getattr(fastckpt, name) is not None for name in fastckpt.__all__)
    assert all(getattr(fastckpt, name).__doc__ for name in fastckpt.__all__ if name != "__version__")
    # A star import does not hide Python's own names.
    for name in ("copy", "list", "open"):
        assert callable(getattr(fastckpt, name))
        assert name not in fastckpt.__all__
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("fastckpt").handlers)


#: Methods of protocols: those of policies, and those that torch, Lightning and fsspec call.
_OF_PROTOCOLS = {
    *("kept", "due", "ranked"),
    *("setup", "on_fit_start", "on_load_checkpoint", "on_save_checkpoint", "on_train_start"),
    *("cat_file", "cp_file", "mv"),
}


def _functions():
    """Public functions, classes that document arguments, and methods of public classes, with their full names."""
    yield from surface.documented()
    for module in surface.modules().values():
        for name, found in surface.public(module).items():
            if inspect.isclass(found) and module.__name__ != "fastckpt.dcp":
                for member in {*dir(found)} - _OF_PROTOCOLS:
                    method = getattr(found, member)
                    ours = inspect.isfunction(method) and method.__module__.startswith("fastckpt")
                    if ours and not member.startswith("_"):
                        yield f"{module.__name__}.{name}.{member}", method


def test_docstrings_tell_arguments_and_results():
    needs.package("torch")
    lacking = []
    for where, function in _functions():
        text, found = inspect.getdoc(function) or "", inspect.signature(function)
        named = (one for one in found.parameters.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
        names = [one.name for one in named if one.name != "self"]
        lacking += [f"{where}: {name}" for name in names if f"{name}: " not in text]
        returns = inspect.isfunction(function) and found.return_annotation not in ("None", None)
        if not text or (names and returns and "Returns:" not in text):
            lacking.append(where)
    assert not lacking


#: Functions that take arguments and raise no errors of their own.
_NEVER_RAISE = {
    *("fastckpt.Manager.path", "fastckpt.Manager.steady", "fastckpt.when.Auto.interval"),
    "fastckpt.types.PendingSave.add_done_callback",
    *(f"fastckpt.types.{kind}.scalars" for kind in ("LoadReport", "SaveReport", "VerifyReport")),
}


def test_docstrings_tell_errors():
    needs.package("torch")
    takes = {where for where, found in _functions() if "Args:" in inspect.getdoc(found)}
    silent = {where for where, found in _functions() if "Raises:" not in inspect.getdoc(found)}
    assert takes & silent == _NEVER_RAISE
    assert {"fastckpt.save", "fastckpt.Manager.save", "fastckpt.keep.Best"} <= takes


def test_star_hides_nothing_of_pythons():
    code = """
import builtins
before = {*globals()}
from fastckpt import *
assert "save" in globals()
assert not {*dir(builtins)} & ({*globals()} - before)
"""
    child(code)


def test_dir_lists_what_is_imported_later():
    code = """
import sys, fastckpt
before = {*sys.modules}
names = dir(fastckpt)
assert {"open", "list", *fastckpt.__all__} <= {*names}
assert {*sys.modules} == before
assert all(getattr(fastckpt, name) is not None for name in fastckpt.__all__)
"""
    child(code)


def test_records_tell_their_fields():
    """The docstring of each public dataclass describes each of its fields."""
    needs.package("torch")
    lacking = []
    for module in surface.modules().values():
        for name, found in surface.public(module).items():
            if dataclasses.is_dataclass(found):
                text = inspect.getdoc(found)
                lacking += [
                    f"{name}.{one.name}" for one in dataclasses.fields(found) if f"    {one.name}: " not in text
                ]
    assert not lacking


def test_every_function_and_class_has_an_example_that_runs(request, tmp_path):
    """The examples run in a process that has imported the integrated frameworks, which takes seconds."""
    needs.package("torch")
    (tmp_path / "program.py").write_text("""
import doctest, inspect, os, tempfile
import fastckpt
from harness import surface

lacking, runner = [], doctest.DocTestRunner()
for where, found in [*surface.documented(), ("SaveReport.scalars", fastckpt.types.SaveReport.scalars)]:
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(found), {}, where, None, None)
    lacking += [] if test.examples else [where]
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        runner.run(test)
        os.chdir("/")
print(lacking, runner.summarize())
""")
    done = programs.run(request.getfixturevalue("libraries").zygote, [tmp_path / "program.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("[] TestResults(failed=0, "), done.stdout


def test_the_installed_distribution_brings_numpy_and_tqdm_alone():
    import re
    from importlib import metadata

    needed = [
        line
        for line in metadata.requires("fastckpt-io")
        if "extra ==" not in line and not re.search("!= .linux.", line)
    ]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in needed) == ["numpy", "tqdm"]
