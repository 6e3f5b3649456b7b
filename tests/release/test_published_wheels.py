"""The published files: the wheels of target/wheels pass the checks of scripts/release, and wrong wheels do not."""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.util
import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from checks import crates, elf, urls, versions, wheels
from harness import needs

ROOT = Path(__file__).parents[2]
VERSION = versions.of_cargo()
CORE = f"fastckpt_io-{VERSION}-cp310-abi3-manylinux_2_27_x86_64.whl"
TOP = f"fastckpt_top-{VERSION}-py3-none-any.whl"
INFO = f"fastckpt_io-{VERSION}.dist-info/"
MODULE = "fastckpt/_core.abi3.so"
MONITOR = "tui/src/fastckpt_top/__init__.py"


def built(name):
    path = ROOT / "target" / "wheels" / name
    if not path.is_file():
        needs.missing(f"needs target/wheels/{name}: scripts/setup with GROUP=dev builds it")
    return path


@pytest.fixture
def core():
    return built(CORE)


@pytest.fixture
def module(core):
    return zipfile.ZipFile(core).read(MODULE)


@pytest.fixture
def changed(core, tmp_path):
    """Return the problems of a changed wheel; None removes a file. RECORD fits unless the changes include it."""

    def make(changes, name=CORE):
        with zipfile.ZipFile(core) as archive:
            inside = {one: archive.read(one) for one in archive.namelist()} | changes
        inside = {one: data for one, data in inside.items() if data is not None}
        record = INFO + "RECORD"
        if record not in changes:
            inside[record] = "".join(
                f"{one},{digest(data)},{len(data)}\n" for one, data in inside.items() if one != record
            )
            inside[record] = f"{inside[record]}{record},,\n".encode()
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for one, data in inside.items():
                archive.writestr(one, data)
        return wheels.problems(tmp_path / name, VERSION)

    return make


def digest(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("name", [CORE, TOP])
def test_the_wheels_are_right(name):
    assert wheels.problems(built(name), VERSION) == []


def test_a_wheel_that_was_packed_again_is_right(changed):
    """This shows that the problems in the next tests come from their changes."""
    assert changed({}) == []


@pytest.mark.parametrize(
    "stray",
    [
        "tests/test_x.py",
        "fastckpt/__pycache__/a.cpython-311.pyc",
        "fastckpt/_other.abi3.so",
        "fastckpt_io.libs/libz.so.1",
    ],
)
def test_a_stray_file_is_found(changed, stray):
    assert f"{stray} does not belong in it" in changed({stray: b"x"})


@pytest.mark.parametrize(
    "name",
    [MODULE, INFO + "licenses/LICENSE-THIRD-PARTY", INFO + "licenses/LICENSE", INFO + "sboms/crates.cyclonedx.json"],
)
def test_a_missing_file_is_found(changed, name):
    found = [line for line in changed({name: None}) if line.endswith(" is missing")]
    assert len(found) == 1
    assert re.fullmatch(found[0].removesuffix(" is missing"), name)


def test_other_contents_are_found(changed):
    assert any("is not the LICENSE" in line for line in changed({INFO + "licenses/LICENSE": b"mine"}))
    assert any("is not that of" in line for line in changed({INFO + "licenses/LICENSE-THIRD-PARTY": b"none"}))
    assert any("RECORD has another hash" in line for line in changed({INFO + "RECORD": b""}))


def test_modules_that_are_not_those_of_the_repository_are_found(changed):
    found = changed({"fastckpt/_paths.py": b"", "fastckpt/_units.py": None, "fastckpt/_old.py": b""})
    assert found == [f"fastckpt/_{name}.py is not that of the repository" for name in ("old", "paths", "units")]


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (f"Version: {VERSION}", "Version: 9.9"),
        ("License-Expression: Apache-2.0", "License-Expression: MIT"),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.8"),
        ("License-File: LICENSE-THIRD-PARTY\n", ""),
        ("Project-URL: Issues, ", "Project-URL: Bugs, "),
    ],
)
def test_other_metadata_are_found(changed, core, said, instead):
    metadata = zipfile.ZipFile(core).read(INFO + "METADATA").decode()
    assert said in metadata
    assert [
        line
        for line in changed({INFO + "METADATA": metadata.replace(said, instead, 1).encode()})
        if re.match("METADATA (says|lists|has the addresses) ", line)
    ]


def test_a_wheel_that_is_too_large_is_found(changed, monkeypatch):
    monkeypatch.setattr(wheels, "LARGEST", 1000)
    assert any("are more than 1,000" in line for line in changed({}))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (CORE.replace("2_27", "2_17"), "it needs a symbol of glibc 2.27"),
        (CORE.replace("manylinux_2_27_x86_64", "linux_x86_64"), "names no version of glibc"),
        (CORE.replace("x86_64", "aarch64"), "it is for EM_X86_64"),
        (CORE.replace("cp310-abi3", "cp311-cp311"), "it is for cp311-cp311"),
        (CORE.replace(VERSION, "9.9"), "its name says 9.9"),
        (CORE.replace("fastckpt_io", "fastckpt"), "no wheel like"),
    ],
)
def test_a_tag_that_promises_other_things_is_found(changed, name, line):
    assert any(line in one for one in changed({}, name))


def poked(module, offset, value):
    data = bytearray(module)
    data[offset : offset + len(value)] = value
    return bytes(data)


def header(module, kind):
    """Return the offset of the program header of a kind."""
    file = ELFFile(io.BytesIO(module))
    index = next(i for i, one in enumerate(file.iter_segments()) if one["p_type"] == kind)
    return file["e_phoff"] + index * file["e_phentsize"]


def test_what_weakens_the_module_is_found(module):
    on = "manylinux_2_27_x86_64"
    assert elf.problems(module, on) == []
    stack = poked(module, header(module, "PT_GNU_STACK") + 4, struct.pack("<I", 7))
    assert elf.problems(stack, on) == ["its stack is executable"]
    relro = poked(module, header(module, "PT_GNU_RELRO"), struct.pack("<I", 0))
    assert any("no RELRO" in line for line in elf.problems(relro, on))
    strange = module.replace(b"libpthread.so.0\0", b"libpthreax.so.0\0")
    assert "it needs libpthreax.so.0, which is not glibc's" in elf.problems(strange, on)
    new = module.replace(b"GLIBC_2.27\0", b"GLIBC_2.37\0")
    assert "it needs a symbol of glibc 2.37, newer than the tag" in elf.problems(new, on)
    place = module.replace(b"/cargo/registry/", b"/root//registry/")
    assert place != module
    assert any("files of the building machine, such as /root/" in line for line in elf.problems(place, on))


@pytest.mark.parametrize("left", [b".symtab", b".debug_info"])
def test_a_module_that_is_not_stripped_is_found(module, left):
    """A section with another name, as long or longer, gets the name of a section that debuggers read."""
    names = ELFFile(io.BytesIO(module)).get_section(ELFFile(io.BytesIO(module))["e_shstrndx"])
    at = names["sh_offset"] + names.data().index(b".eh_frame_hdr\0")
    renamed = poked(module, at, left + b"\0")
    assert elf.problems(renamed, "manylinux_2_27_x86_64") == ["it is not stripped"]


def test_a_dynamic_section_that_weakens_the_module_is_found(module):
    file = ELFFile(io.BytesIO(module))
    section = file.get_section_by_name(".dynamic")
    places = {tag.entry.d_tag: section["sh_offset"] + 16 * i for i, tag in enumerate(section.iter_tags())}
    late = module
    for tag in ("DT_FLAGS", "DT_FLAGS_1", "DT_BIND_NOW"):
        if tag in places:
            late = poked(late, places[tag], struct.pack("<QQ", 0x6FFFFEF5, 0))
    assert any("no BIND_NOW" in line for line in elf.problems(late, "manylinux_2_27_x86_64"))
    runpath = poked(module, places["DT_FLAGS_1"], struct.pack("<QQ", 29, 1))
    assert "it has a DT_RUNPATH" in elf.problems(runpath, "manylinux_2_27_x86_64")


def test_licences_and_bill_fit_the_lock():
    assert crates.unlicensed(crates.linked()) == []
    assert crates.stale(VERSION) == []


def test_a_bill_that_does_not_fit_is_found(tmp_path, monkeypatch):
    linked = crates.linked()
    monkeypatch.setattr(crates, "linked", lambda _: linked)
    for name, text in crates.files(VERSION).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    assert crates.stale(VERSION, tmp_path) == []
    monkeypatch.setattr(crates, "linked", lambda _: linked[1:])
    found = crates.stale(VERSION, tmp_path)
    assert [line.split()[0] for line in found] == [crates.TEXTS, crates.BILL]


@pytest.mark.parametrize(
    ("licence", "good"),
    [
        ("MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("MIT/Apache-2.0", True),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR Apache-2.0) AND GPL-3.0-only", False),
        ("", False),
    ],
)
def test_which_licences_are_allowed(tmp_path, licence, good):
    (tmp_path / "LICENSE").write_text("text")
    assert (crates.unlicensed([crates.Crate("a", "1.0", licence, tmp_path)]) == []) is good


def test_a_crate_without_a_text_is_found(tmp_path):
    assert "no text" in crates.unlicensed([crates.Crate("a", "1.0", "MIT", tmp_path)])[0]


@pytest.mark.parametrize(
    ("file", "old", "new", "tag", "line"),
    [
        ("CHANGELOG.md", "", "", None, None),
        ("CHANGELOG.md", "## [Unreleased]", f"## [{VERSION}] - 2026-12-01", f"v{VERSION}", None),
        ("CHANGELOG.md", "## [Unreleased]", f"## [{VERSION}] - 2026-12-01", "v9.9", "the tag is v9.9"),
        ("CHANGELOG.md", "## [Unreleased]", "## [9.9] - 2026-12-01", None, "CHANGELOG.md begins with 9.9"),
        ("CHANGELOG.md", "## [Unreleased]", "## [Unreleased]", f"v{VERSION}", "CHANGELOG.md begins with Unreleased"),
        ("tui/pyproject.toml", f'version = "{VERSION}"', 'version = "9.9"', None, "tui/pyproject.toml has 9.9"),
        (MONITOR, f'__version__ = "{VERSION}"', '__version__ = "9.9"', None, f"{MONITOR} has 9.9"),
    ],
)
def test_different_versions_are_found(tmp_path, file, old, new, tag, line):
    (tmp_path / MONITOR).parent.mkdir(parents=True)
    for name in ("Cargo.toml", "tui/pyproject.toml", MONITOR):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n", "utf-8")
    path = tmp_path / file
    assert old in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace(old, new, 1) if old else path.read_text("utf-8"), "utf-8")
    found = versions.different(tmp_path, tag)
    assert len(found) == (line is not None)
    assert all(one.startswith(line) for one in found)


def addresses(root, host, monitors=None):
    """Write two projects with addresses at a host."""
    (root / "tui").mkdir()
    for name, at in (("pyproject.toml", host), ("tui/pyproject.toml", monitors or host)):
        table = "".join(f'{each} = "https://{at}/{each.lower()}"\n' for each in urls.NAMES)
        (root / name).write_text(f"[project.urls]\n{table}\n[project.scripts]\n", "utf-8")
    (root / "SECURITY.md").write_text(f"Report it: <https://{host}/security>.", "utf-8")
    return root


def test_addresses_are_placeholders_or_all_set():
    assert urls.problems() == []
    unset = [name for name, url in urls.of(ROOT / "pyproject.toml").items() if "//unset.invalid/" in url]
    assert unset in ([], list(urls.NAMES))


def test_a_release_with_placeholders_is_refused(tmp_path):
    root = addresses(tmp_path, "unset.invalid")
    assert urls.problems(root) == []
    found = urls.problems(root, tag="v1")
    assert [line.split(" is ")[0] for line in found] == [f"pyproject.toml: {name}" for name in urls.NAMES]
    assert all("a placeholder" in line for line in found)


@pytest.fixture
def release(monkeypatch):
    """Return scripts/release as a module."""
    loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "scripts" / "release"))
    release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # no bytecode beside a file without a suffix
    loader.exec_module(release)
    return release


def test_a_commit_while_a_release_is_built_changes_nothing(release, monkeypatch):
    heads = iter(["aaa 1\n", "bbb 2\n"])
    monkeypatch.setattr(release, "run", lambda *_: next(heads))
    assert [release.environment()["SOURCE_DATE_EPOCH"] for _ in range(2)] == ["1", "1"]


def test_a_release_that_is_not_built_ends_with_what_failed(release, tmp_path, monkeypatch, capsys):
    """A command that fails becomes a line of its check. Checks of the packages are left out."""

    def run(*command, **_):
        raise subprocess.CalledProcessError(7, command, "", "no compiler")

    for name in ("WORK", "DIST", "PAGE"):
        monkeypatch.setattr(release, name, tmp_path / name)
    for module, name in ((crates, "linked"), (crates, "unlicensed"), (crates, "stale"), (release, "named")):
        monkeypatch.setattr(module, name, lambda *_: [])
    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(release, "environment", dict)
    monkeypatch.setattr(sys, "argv", ["release"])
    assert release.main() == 1
    said = capsys.readouterr().out
    assert "no compiler" in said
    assert said.endswith("\nfailed: a clean clone, everything is built\n")


def test_the_release_script_fails_with_placeholders(release, tmp_path, monkeypatch, capsys):
    """The script checks with the given tag, and its exit status follows the report."""
    root, check = addresses(tmp_path, "unset.invalid"), urls.problems
    monkeypatch.setattr(urls, "problems", lambda tag: check(root, tag))
    monkeypatch.setattr(versions, "different", lambda **_: [])
    for tag, good in ((None, True), ("v1", False)):
        report = release.Report()
        release.named(report, tag)
        assert report.good is good
    assert "a placeholder: set the real address" in capsys.readouterr().out


def test_real_addresses_are_released(tmp_path):
    assert urls.problems(addresses(tmp_path, "example.org"), tag="v1") == []


def test_other_addresses_of_the_monitor_are_found(tmp_path):
    assert urls.problems(addresses(tmp_path, "example.org", "example.com")) == [
        "tui/pyproject.toml has other [project.urls] than pyproject.toml"
    ]


def test_a_page_that_tells_of_vulnerabilities_elsewhere_is_found(tmp_path):
    root = addresses(tmp_path, "example.org")
    (root / "SECURITY.md").write_text("Report it: <https://unset.invalid/security>.", "utf-8")
    assert urls.problems(root) == ["SECURITY.md does not name the address that pyproject.toml has as Security"]


def test_missing_and_odd_addresses_are_found(tmp_path):
    page = addresses(tmp_path, "example.org") / "pyproject.toml"
    page.write_text(page.read_text("utf-8").replace("Issues", "Bugs").replace("https:", "http:", 1), "utf-8")
    missing, _, odd = urls.problems(tmp_path)
    assert missing == "pyproject.toml has no address called Issues in [project.urls]"
    assert odd.startswith("pyproject.toml: Homepage is http://example.org/")


def test_a_source_distribution_is_checked(tmp_path):
    base = f"fastckpt_io-{VERSION}"

    def problems(names):
        with tarfile.open(tmp_path / f"{base}.tar.gz", "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"{base}/{name}"), io.BytesIO())
        return wheels.problems(tmp_path / f"{base}.tar.gz", VERSION)

    whole = ["PKG-INFO", *wheels.SOURCES_MUST, "python/fastckpt/__init__.py"]
    assert problems(whole) == []
    assert problems([*whole, "tests/test_x.py"]) == ["tests/test_x.py does not belong in it"]
    assert problems(whole[:1] + whole[2:]) == [r"Cargo\.lock is missing"]


@pytest.mark.parametrize("name", ["fastckpt_io-9.9", f"fastckpt-{VERSION}", f"fastckpt_top-{VERSION}"])
def test_a_source_distribution_of_another_name_is_found(tmp_path, name):
    tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz").close()
    (line,) = wheels.problems(tmp_path / f"{name}.tar.gz", VERSION)
    assert line.startswith(f"no source distribution {name}.tar.gz is published")


def test_a_link_in_a_source_distribution_is_found(tmp_path):
    path = tmp_path / f"fastckpt_io-{VERSION}.tar.gz"
    link = tarfile.TarInfo(f"fastckpt_io-{VERSION}/README.md")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(link)
    assert f"{link.name} is not a plain file" in wheels.problems(path, VERSION)
