"""A wheel or a source distribution as a file: its contents, its size, its metadata."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

from checks import crates, elf, urls

ROOT = Path(__file__).resolve().parents[2]
#: The most bytes that a published file may have.
LARGEST = 5_000_000
INFO = r"\w+-[\w.]+\.dist-info/"
ABOUT = rf"{INFO}(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|licenses/LICENSE)"
PYTHON = r"fastckpt/([\w/]+\.py|_core\.pyi|py\.typed)"
CORE = rf"fastckpt/_core\.abi3\.so|{INFO}licenses/LICENSE-THIRD-PARTY|{INFO}sboms/crates\.cyclonedx\.json"
#: The allowed and the required contents of each kind of wheel, by the beginning of its name and its platform.
MAY = {
    ("fastckpt_io", "core"): rf"{ABOUT}|{PYTHON}|{CORE}",
    ("fastckpt_io", "any"): rf"{ABOUT}|{PYTHON}",
    ("fastckpt_top", "any"): rf"{ABOUT}|fastckpt_top/([\w/]+\.(py|tcss)|py\.typed|schema\.json)",
}
MUST = {
    ("fastckpt_io", "core"): ["fastckpt/__init__.py", "fastckpt/py.typed", *CORE.split("|")],
    ("fastckpt_io", "any"): ["fastckpt/__init__.py", "fastckpt/py.typed", "fastckpt/_portable/.+"],
    ("fastckpt_top", "any"): ["fastckpt_top/__init__.py", r"fastckpt_top/py\.typed", r"fastckpt_top/schema\.json"],
}
ALWAYS = [f"{INFO}{name}" for name in ("METADATA", "WHEEL", "RECORD", r"entry_points\.txt", "licenses/LICENSE")]
#: The allowed and the required contents of the source distribution, below its own directory.
SOURCES = (
    r"PKG-INFO|Cargo\.(lock|toml)|LICENSE(-THIRD-PARTY)?|README\.md|pyproject\.toml"
    r"|python/fastckpt/([\w/]+\.pyi?|py\.typed)|rust/crates\.cyclonedx\.json"
    r"|rust/fastckpt-(core|py)/(Cargo\.toml|build\.rs|(src|benches|tests)/[\w/]+\.rs)"
)
SOURCES_MUST = ["Cargo.lock", "LICENSE", crates.TEXTS, crates.BILL, "rust/fastckpt-py/build.rs"]


def problems(path: Path, version: str) -> list[str]:
    """Problems of a wheel or a source distribution: a line each."""
    wrong = [] if path.stat().st_size < LARGEST else [f"{path.stat().st_size:,} bytes are more than {LARGEST:,}"]
    return wrong + (_wheel(path, version) if path.suffix == ".whl" else _sources(path, version))


def platform(path: Path) -> str:
    """The platform of a wheel's name, such as manylinux_2_27_x86_64."""
    return path.stem.split("-")[-1]


def _wheel(path: Path, version: str) -> list[str]:
    name, named_version, python, abi, on = path.stem.split("-")
    kind = (name, "any" if on == "any" else "core")
    if kind not in MAY:
        return [f"no wheel like {path.name} is published"]
    expected = ("py3", "none") if on == "any" else ("cp310", "abi3")
    wrong = [] if (python, abi) == expected else [f"it is for {python}-{abi}, and {'-'.join(expected)} is expected"]
    with zipfile.ZipFile(path) as archive:
        inside = {each.filename: archive.read(each) for each in archive.infolist()}
    wrong += contents(inside, MAY[kind], MUST[kind] + ALWAYS)
    wrong += _programs(inside, ROOT / ("tui/src" if name == "fastckpt_top" else "python"))
    wrong += _record(inside)
    wrong += _metadata(inside, name, version, named_version)
    for each, data in inside.items():
        if each.endswith(".so"):
            wrong += [f"{each}: {line}" for line in elf.problems(data, on)]
        if each.endswith("/LICENSE") and data != (ROOT / "LICENSE").read_bytes():
            wrong.append(f"{each} is not the LICENSE of the repository")
        if each.endswith("/" + crates.TEXTS) and data != (ROOT / crates.TEXTS).read_bytes():
            wrong.append(f"{each} is not that of the repository")
    return wrong


def contents(names: dict[str, bytes] | list[str], may: str, must: list[str]) -> list[str]:
    """A line for each file that may not be there, and for each pattern that no file has."""
    stray = [f"{name} does not belong in it" for name in names if not re.fullmatch(may, name)]
    return stray + [f"{one} is missing" for one in must if not any(re.fullmatch(one, name) for name in names)]


def _programs(inside: dict[str, bytes], source: Path) -> list[str]:
    """Check that it has all modules of the repository, and no others: builders keep old ones and omit new folders."""
    ours = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.py")}
    packed = {each: data for each, data in inside.items() if each.endswith(".py")}
    names = sorted(ours.keys() | packed.keys())
    return [f"{each} is not that of the repository" for each in names if ours.get(each) != packed.get(each)]


def _record(inside: dict[str, bytes]) -> list[str]:
    """Check that RECORD lists each file with its hash: future installers refuse a wheel without it."""
    (name,) = [each for each in inside if each.endswith(".dist-info/RECORD")] or [None]
    if name is None:
        return []
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(inside[name].decode())) if row}
    wrong = [f"RECORD lists {each}, which is not there" for each in sorted(listed.keys() - inside.keys())]
    for each, data in inside.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if each != name and listed.get(each) != digest:
            wrong.append(f"RECORD has another hash of {each}, or none")
    return wrong


def _metadata(inside: dict[str, bytes], name: str, version: str, named_version: str) -> list[str]:
    said = [data for each, data in inside.items() if each.endswith(".dist-info/METADATA")]
    if not said:
        return []
    head = email.message_from_bytes(said[0])
    expected = {
        "Name": name.replace("_", "-"),
        "Version": version,
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.10",
    }
    wrong = [f"METADATA says {key}: {head[key]}, not {value}" for key, value in expected.items() if head[key] != value]
    if named_version != version:
        wrong.append(f"its name says {named_version}, Cargo.toml {version}")
    addresses = {f"{label}, {url}" for label, url in urls.of(ROOT / "pyproject.toml").items()}
    if set(head.get_all("Project-URL", [])) != addresses:
        wrong.append(f"METADATA has the addresses {head.get_all('Project-URL')}, pyproject.toml {sorted(addresses)}")
    licences = [each.partition("licenses/")[2] for each in inside if "/licenses/" in each]
    if sorted(head.get_all("License-File", [])) != sorted(licences):
        wrong.append(f"METADATA lists the licences {head.get_all('License-File')}, and it has {licences}")
    return wrong


def _sources(path: Path, version: str) -> list[str]:
    base = path.name.removesuffix(".tar.gz")
    if base != f"fastckpt_io-{version}":
        return [f"no source distribution {path.name} is published, with version {version} in Cargo.toml"]
    with tarfile.open(path) as archive:
        files = [one for one in archive.getmembers() if not one.isdir()]
    wrong = [f"{one.name} is not a plain file" for one in files if not one.isfile()]
    names = [one.name.removeprefix(base + "/") for one in files]
    return wrong + contents(names, SOURCES, [re.escape(one) for one in SOURCES_MUST])
