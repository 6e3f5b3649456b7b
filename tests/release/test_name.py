"""Another project's distribution is called ``fastckpt``, with a module of that name: tests of the messages to users."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
import zipfile
from pathlib import Path

import fastckpt_top
import numpy as np
import platformdirs
import pytest
import rich

import fastckpt
from fastckpt import _namesake
from harness import wheels

ROOT = Path(__file__).parents[2]

#: The files of the other distribution: an empty module, and files that this package lacks.
STRANGER = {"fastckpt/__init__.py": b"", "fastckpt/monkey_patch.py": b"x = 1\n"}
SAVE = "import fastckpt, sys; fastckpt.save({'a': 1}, sys.argv[1]); print(fastckpt.load(sys.argv[1]))"

#: With warnings as errors, the import raises a readable error and leaves no half-imported module.
STRICT = f"""
import warnings
for turn in range(2):
    try:
        import fastckpt
    except RuntimeWarning as warning:
        print(warning)
    else:
        raise AssertionError("no warning")
warnings.simplefilter("ignore")
{SAVE}
"""


@pytest.fixture(scope="module")
def at_hand(tmp_path_factory):
    """A directory with a wheel of this package and a wheel of the other project."""
    directory = tmp_path_factory.mktemp("wheels")
    wheels.of_the_installed_package(directory)
    wheels.write(directory, "fastckpt", "0.0.4", STRANGER)
    return directory


@pytest.fixture
def environment(tmp_path, at_hand):
    numpy = Path(np.__file__).parent
    borrowed = [Path(module.__file__).parent for module in (np, fastckpt_top, platformdirs, rich)]
    borrowed += [libraries for libraries in [numpy.with_name("numpy.libs")] if libraries.is_dir()]
    made = wheels.Environment(tmp_path / "env", at_hand, borrowed)
    made.checkpoint = str(tmp_path / "step-1")
    made.segments = str(tmp_path / "segments")
    return made


def remedy(text):
    """Return the two commands at the end of a message, as arguments of pip."""
    found = re.search(r"(pip uninstall fastckpt) && (pip install [^&\n\"]*fastckpt-io)", text)
    assert found, text
    return [command.split()[1:] for command in found.groups()]


def all_is_well(environment):
    out, err = environment.run("python", "-W", "error", "-c", SAVE, environment.checkpoint)
    assert (out, err) == ("{'a': 1}\n", "")
    out, err = environment.run("fastckpt", "ls", environment.checkpoint)
    assert not err
    assert "0 tensors" in out


def monitor(environment, *options):
    """Return what the monitor prints if it finds no process."""
    return environment.run("python", "-m", "fastckpt_top", *options, status=3, FASTCKPT_TOP_DIR=environment.segments)[1]


# -- both in one environment -------------------------------------------------------------------------------------------


def test_theirs_then_ours_warns_at_import_and_the_remedy_heals(environment):
    environment.pip("install", "fastckpt")
    err = environment.run("python", "-c", "import fastckpt; fastckpt.save", status=1)[1]
    assert err.endswith("AttributeError: module 'fastckpt' has no attribute 'save'\n")
    # Here only the monitor can report the problem, and fastckpt-io must be installed with its dependencies.
    assert remedy(monitor(environment, "--once"))[1] == ["install", "fastckpt-io"]

    said = environment.pip("install", "fastckpt-io")
    assert "0.0.4" not in said, "pip itself tells now"
    assert (environment.site / "fastckpt" / "__init__.py").stat().st_size, "ours"
    out, err = environment.run("python", "-c", f"x = 1\n{SAVE}", environment.checkpoint)
    assert out == "{'a': 1}\n"
    assert err.count("Warning") == 1
    assert err.startswith("<string>:2: RuntimeWarning: fastckpt 0.0.4 and fastckpt-io are both installed")
    assert str(environment.site / "fastckpt") in err
    assert remedy(environment.run("fastckpt", "ls", environment.checkpoint)[1]) == remedy(err)
    out, strict = environment.run("python", "-W", "error", "-c", STRICT, environment.checkpoint)
    once, again, loaded = out.splitlines()
    assert (once, loaded, strict) == (again, "{'a': 1}", "")
    assert remedy(once) == remedy(err)

    uninstall, install = remedy(err)
    environment.pip(*uninstall, "--yes")
    environment.pip(*install)
    all_is_well(environment)


def test_ours_then_theirs_is_told_by_whatever_of_ours_still_runs(environment):
    environment.pip("install", "fastckpt-io")
    all_is_well(environment)
    assert "pip" not in monitor(environment, "--once")

    environment.pip("install", "fastckpt")
    assert not (environment.site / "fastckpt" / "__init__.py").stat().st_size, "theirs"
    # No code of this package runs here, so docs/install.md describes this error.
    err = environment.run("python", "-c", "import fastckpt; fastckpt.save", status=1)[1]
    assert err.endswith("AttributeError: module 'fastckpt' has no attribute 'save'\n")
    assert "`module 'fastckpt' has no attribute 'save'`" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    # Submodules of this package warn.
    err = environment.run("python", "-c", "import fastckpt.distributed, fastckpt.exceptions")[1]
    assert err.count("RuntimeWarning: fastckpt 0.0.4 and fastckpt-io are both installed") == 1
    # The command reports the problem under both names, and as JSON.
    out, err = environment.run("fastckpt", "ls", environment.checkpoint, status=2)
    assert not out
    assert err.startswith("fastckpt: cannot import fastckpt: fastckpt 0.0.4, another project's, has overwritten ")
    assert environment.run("python", "-m", "fastckpt", "ls", environment.checkpoint, status=2) == (out, err)
    document = json.loads(environment.run("fastckpt", "--version", "--json", status=2)[0])
    assert document["type"] == "ImportError"
    assert remedy(document["error"]) == remedy(err)
    for options in (("--once",), ("debug", "ls")):
        assert remedy(monitor(environment, *options)) == remedy(err)

    uninstall, install = remedy(err)
    environment.pip(*uninstall, "--yes")
    # Files are missing after the other distribution is uninstalled.
    assert not (environment.site / "fastckpt" / "__init__.py").exists()
    err = environment.run("fastckpt", "ls", environment.checkpoint, status=2)[1]
    assert "another distribution has overwritten or removed" in err
    assert remedy(err)[1] == install
    environment.pip(*install)
    all_is_well(environment)


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fastckpt-0.0.4.dist-info", "fastckpt 0.0.4"),
        ("Fastckpt-1.0.post1+cu12.dist-info", "fastckpt 1.0.post1+cu12"),
        ("fastckpt-0.0.4-py3.11.egg-info", "fastckpt 0.0.4"),
        ("fastckpt.egg-info", "the distribution fastckpt"),
        ("fastckpt_io-0.1.0.dist-info", None),
        ("fastckpt-io-0.1.0.dist-info", None),
        ("fastckpt_io-0.1.0-py3.11.egg-info", None),
        ("fastckpt_top-0.1.0.dist-info", None),
        ("fastckpts-0.1.0.dist-info", None),
        ("my.fastckpt-0.1.0.dist-info", None),
        ("~astckpt-0.0.4.dist-info", None),  # what a killed pip leaves
        ("fastckpt", None),
    ],
)
def test_names_of_distributions(tmp_path, name, told):
    (tmp_path / name).mkdir()
    assert _namesake._other_in(tmp_path) == told


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("fastckpt/__init__.py,sha256=x,0\n", True),
        ("../../../bin/x,,\nfastckpt/a.py,,\nfastckpt-0.0.4.dist-info/RECORD,,\n", True),
        # A later version with files elsewhere, or an editable install, overwrites nothing.
        ("fastckpt_v2/__init__.py,,\nfastckpt-0.0.4.dist-info/RECORD,,\n", False),
        # This package was packed under the other name.
        ("fastckpt/__init__.py,,\nfastckpt/_namesake.py,sha256=x,0\n", False),
        (None, True),
    ],
)
def test_lists_of_files(tmp_path, record, told):
    about = tmp_path / "fastckpt-0.0.4.dist-info"
    about.mkdir()
    if record is None:
        (about / "RECORD").mkdir()  # it cannot be read
    else:
        (about / "RECORD").write_text(record, encoding="utf-8")
    assert (_namesake._other_in(tmp_path) is not None) == told


def test_a_file_in_the_place_of_the_directory_counts(tmp_path):
    (tmp_path / "fastckpt-0.0.4-py3.9.egg-info").write_text("Name: fastckpt\n", encoding="utf-8")
    assert _namesake._other_in(tmp_path) == "fastckpt 0.0.4"


def test_what_cannot_be_listed_is_silent(tmp_path, monkeypatch):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("fastckpt-0.0.4.dist-info/METADATA", "")
    assert _namesake._other_in(archive) is None
    assert _namesake._other_in(tmp_path / "missing") is None

    def refuse(_):
        raise PermissionError

    (tmp_path / "fastckpt-0.0.4.dist-info").mkdir()
    assert _namesake._other_in(tmp_path)
    monkeypatch.setattr(os, "listdir", refuse)
    assert _namesake._other_in(tmp_path) is None


def test_elsewhere_on_the_path_it_overwrites_nothing(tmp_path, monkeypatch):
    (tmp_path / "fastckpt-0.0.4.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _namesake.warn_of_namesake()


def test_the_module_that_every_list_of_files_is_asked_for_is_there():
    assert Path(_namesake.__file__).relative_to(Path(fastckpt.__file__).parent).as_posix() == "_namesake.py"


# -- documents ---------------------------------------------------------------------------------------------------------

_INSTALL = re.compile(r"\b(?:pip3?|pipx|uv|uvx)\s+(?:(?:pip|tool)\s+)?(?:install|download|wheel|add|run)\b([^\n#`&;]*)")
_STRANGER = re.compile(r"(?<![\w./@-])fastckpt(?![\w./-])")


def documents():
    for pattern in ("*.md", "*.toml", "docs/*.md", "examples/*.py", "scripts/*", ".github/**/*.yml"):
        yield from filter(Path.is_file, ROOT.glob(pattern))
    for folder in ("benchmarks", "python", "rust", "tui"):
        for suffix in ("md", "py", "rs", "toml"):
            yield from (ROOT / folder).rglob(f"*.{suffix}")


def wrong(text):
    return [found[0] for found in _INSTALL.finditer(text) if _STRANGER.search(found[1])]


def test_no_document_installs_the_stranger():
    for line in (
        "pip install fastckpt",
        'pip install "fastckpt[torch]"',
        "uv pip install -U fastckpt==1",
        "uv add fastckpt",
    ):
        assert wrong(line), line
    for line in (
        "pip install fastckpt-io fastckpt-top",
        "pip uninstall fastckpt && pip install fastckpt-io",
        "pip install ./fastckpt",
    ):
        assert not wrong(line), line
    read = {path: path.read_text(encoding="utf-8") for path in documents()}
    assert {str(path.relative_to(ROOT)): wrong(text) for path, text in read.items() if wrong(text)} == {}
    for name in ("README.md", "docs/install.md", "tui/README.md"):
        assert re.search(r"pip install [^\n]*fastckpt-io", read[ROOT / name]), name
