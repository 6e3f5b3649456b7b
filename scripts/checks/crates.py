"""The crates that are linked into the wheel: their licences, with the texts, and a bill of them (SBOM).

scripts/third-party writes both to the repository; :func:`stale` returns which of them differ from Cargo.lock.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS, BILL = "LICENSE-THIRD-PARTY", "rust/crates.cyclonedx.json"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
#: Licences that require only their text, and the accepted exceptions.
ALLOWED = {
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
TEXT = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Crate:
    """One crate of one version."""

    name: str
    version: str
    licence: str
    directory: Path

    @property
    def url(self) -> str:
        """The package URL, by which scanners identify it."""
        return f"pkg:cargo/{self.name}@{self.version}"


def linked(root: Path = ROOT) -> list[Crate]:
    """All foreign crates whose code is in the wheel of any target, in order: no build scripts, macros or tests."""
    found = set()
    for target in TARGETS:
        tree = _cargo(
            root,
            "tree",
            "--package=fastckpt-py",
            "--edges=normal,no-proc-macro",
            f"--target={target}",
            "--prefix=none",
            "--no-dedupe",
            "--format={p}",
        )
        wanted = {tuple(line.split()[:2]) for line in tree.splitlines()}
        packages = json.loads(_cargo(root, "metadata", "--format-version=1", f"--filter-platform={target}"))["packages"]
        found |= {
            Crate(one["name"], one["version"], one["license"] or "", Path(one["manifest_path"]).parent)
            for one in packages
            if (one["name"], f"v{one['version']}") in wanted and one["source"]
        }
    return sorted(found)


def _cargo(root: Path, *arguments: str) -> str:
    command = ["cargo", *arguments, "--locked"]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


def unlicensed(crates: list[Crate]) -> list[str]:
    """Problems with licences: one line for each crate without an allowed choice, or without a text."""
    wrong = [
        f"{one.name} {one.version}: {one.licence or 'no licence'} is not allowed"
        for one in crates
        if not _allowed(one.licence)
    ]
    return wrong + [
        f"{one.name} {one.version}: the crate has no text of its licence" for one in crates if not _texts(one)
    ]


def _allowed(expression: str) -> bool:
    """Whether an SPDX expression has an allowed choice; with parentheses, whether all of its licences are allowed."""
    if "(" in expression:
        return {one.strip() for one in re.split(r" OR | AND |[()]", expression)} - {""} <= ALLOWED
    choices = re.split(r" OR |/", expression)
    return any({one.strip() for one in choice.split(" AND ")} <= ALLOWED for choice in choices)


def _texts(crate: Crate) -> list[str]:
    files = sorted(path for path in crate.directory.iterdir() if path.is_file() and TEXT.match(path.name))
    return [path.read_text("utf-8").strip() for path in files]


def texts(crates: list[Crate]) -> str:
    """All licences, each text once, after the names of its crates."""
    names, shown = defaultdict(list), {}
    for one in crates:
        for text in _texts(one):
            # Many licence texts differ only in spaces.
            words = " ".join(text.split())
            shown.setdefault(words, "\n".join(line.rstrip() for line in text.splitlines()))
            names[words].append(f"{one.name} {one.version}")
    listed = [f"    {one.name} {one.version}: {one.licence}" for one in crates]
    head = [
        "The compiled core of fastckpt contains these crates, each under its own licence. It also contains",
        "the standard library of Rust (MIT OR Apache-2.0, The Rust Project Contributors). Where there is a",
        "choice with Apache-2.0, fastckpt makes it. scripts/third-party writes this file.",
        "",
        *listed,
    ]
    parts = [f"{'=' * 80}\n{', '.join(who)}\n{'=' * 80}\n\n{shown[words]}" for words, who in names.items()]
    return "\n\n".join(["\n".join(head), *parts]) + "\n"


def bill(crates: list[Crate], version: str) -> str:
    """The bill of materials, in CycloneDX 1.5: no times or places, so that the same crates give the same text."""
    components = [
        {
            "type": "library",
            "bom-ref": one.url,
            "name": one.name,
            "version": one.version,
            "licenses": [{"expression": one.licence.replace("/", " OR ")}],
            "purl": one.url,
        }
        for one in crates
    ]
    ours = f"pkg:pypi/fastckpt-io@{version}"
    subject = {"type": "library", "bom-ref": ours, "name": "fastckpt-io", "version": version, "purl": ours}
    needs = [{"ref": ours, "dependsOn": [one.url for one in crates]}]
    whole = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": subject}}
    return json.dumps({**whole, "components": components, "dependencies": needs}, indent=2) + "\n"


def files(version: str, root: Path = ROOT) -> dict[str, str]:
    """The expected texts of the two files of the repository."""
    crates = linked(root)
    return {TEXTS: texts(crates), BILL: bill(crates, version)}


def stale(version: str, root: Path = ROOT) -> list[str]:
    """A line for each of the two files that is not as expected."""
    return [
        f"{name} does not fit Cargo.lock: run scripts/third-party"
        for name, text in files(version, root).items()
        if not (root / name).is_file() or (root / name).read_text("utf-8") != text
    ]
