"""The layers of the core: each folder may name only lower ones, and modules form no cycles.

The test reads code as text, and finds every path that begins with ``crate::``, ``super::`` or ``self::`` outside tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCE = Path(__file__).parents[2] / "rust" / "fastckpt-core" / "src"

#: The folders from the lowest to the highest layer. A folder may name only folders of lower lines.
LAYERS = (
    ("sys", "error", "environment"),
    ("format",),
    ("telemetry", "commit", "share"),
    ("engine",),
    ("read",),
    ("save",),
    ("snapshot", "probe", "ranks"),
)
LEVEL = {name: number for number, layer in enumerate(LAYERS) for name in layer}

#: Intended cycles between modules, with their reasons.
EXCEPTIONS: dict[frozenset[str], str] = {}

Graph = dict[str, set[str]]


def modules(source: Path) -> dict[str, str]:
    """The text of each module without comments, strings and tests, by module path, such as ``engine::io::uring``."""
    texts = {}
    for file in sorted(source.rglob("*.rs")):
        parts = file.relative_to(source).with_suffix("").parts
        texts["::".join(part for part in parts if part not in ("mod", "lib"))] = bare(file.read_text(encoding="utf-8"))
    tests = {f"{name}::{test}".lstrip(":") for name, text in texts.items() for test in re.findall(TEST_FILE, text)}
    return {name: re.sub(TEST_FILE, "", text) for name, text in texts.items() if name not in tests}


TEST_FILE = r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))? )?mod (\w+);"


def bare(text: str) -> str:
    """The code without comments, strings, and items with a body under ``#[cfg(test)]``."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    while found := re.search(r"#\[cfg\(test\)\][^;{]*\{", text):
        at, depth = found.end(), 1
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        text = text[: found.start()] + text[at:]
    return text


def paths(text: str) -> Iterator[list[str]]:
    """All paths that begin at the root or relative to the module, with nested ``use`` lists expanded."""
    for found in re.finditer(r"\b(?:crate|super|self)::", text):
        if not text[: found.start()].endswith("::"):
            yield from expand(text[found.start() :])[0]


def expand(text: str) -> tuple[list[list[str]], int]:
    """The paths at the beginning of ``text``, and where they end."""
    head = re.match(r"\s*(\w+|\*)?", text)
    assert head is not None
    name, at = head[1], head.end()
    if name is None:
        return [], at
    if not text.startswith("::", at):
        return [[name]], at
    at += 2
    if not text.startswith("{", at):
        rest, used = expand(text[at:])
        return [[name, *path] for path in rest] or [[name]], at + used
    at += 1
    found: list[list[str]] = []
    while not text.startswith("}", at):
        rest, used = expand(text[at:])
        found += rest
        at += used
        skipped = re.match(r"(?:\s+as\s+\w+)?\s*,?\s*", text[at:])
        assert skipped is not None
        if not used and not skipped.end():
            break
        at += skipped.end()
    return [[name, *path] for path in found], at + 1


def resolve(module: str, path: list[str], known: Iterable[str]) -> str:
    """The module that ``path`` names in ``module``, or whose item it names; empty for the root."""
    at = module.split("::") if module else []
    if path[0] == "crate":
        at, path = [], path[1:]
    while path and path[0] in ("self", "super"):
        at, path = at[:-1] if path[0] == "super" else at, path[1:]
    while path and "::".join([*at, path[0]]) in known:
        at, path = [*at, path[0]], path[1:]
    return "::".join(at)


def graph(source: Path) -> Graph:
    """The modules whose items each module names."""
    texts = modules(source)
    found: Graph = {name: set() for name in texts}
    for name, text in texts.items():
        children = [child for child in re.findall(r"\bmod (\w+);", text) if re.search(rf"(?<![:\w]){child}::", text)]
        for path in [*paths(text), *(["self", child] for child in children)]:
            if (target := resolve(name, path, texts)) != name:
                found[name].add(target)
    return found


def upward(modules: Graph) -> list[str]:
    """Names of folders that are not in a lower layer than the folder that names them."""
    wrong = []
    for name, targets in modules.items():
        folder = name.split("::")[0]
        for target in targets:
            above = target.split("::")[0]
            if folder and folder != above and LEVEL.get(above, len(LAYERS)) >= LEVEL[folder]:
                wrong.append(f"{name} names {target or 'the root'}")
    return sorted(wrong)


def circles(modules: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in sorted(modules[name]):
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == numbers[name]:
            members = [stack.pop()]
            while members[-1] != name:
                members.append(stack.pop())
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(modules):
        if name not in numbers:
            visit(name)
    return found


def test_every_folder_has_its_layer():
    assert {name.split("::")[0] for name in modules(SOURCE)} - {""} == set(LEVEL)


def test_no_folder_names_one_above_it():
    assert upward(graph(SOURCE)) == []


def test_no_circle_of_modules():
    wrong = [members for members in circles(graph(SOURCE)) if frozenset(members) not in EXCEPTIONS]
    assert wrong == []


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"sys/a.rs": "use crate::format::b::C;", "format/b.rs": ""}, (1, 0)),
        ({"sys/a.rs": "fn f() -> crate::format::b::C {}", "format/b.rs": ""}, (1, 0)),
        ({"sys/a.rs": "fn f() -> crate::Result<()> {}"}, (1, 0)),
        ({"read/a.rs": "use crate::save::b::C;", "save/b.rs": ""}, (1, 0)),
        ({"format/b.rs": "use crate::sys::a::C;", "sys/a.rs": "// crate::format::b"}, (0, 0)),
        (
            {"sys/a.rs": '#[cfg(test)]\nmod tests { use crate::format::b::C; fn f() { "}"; } }', "format/b.rs": ""},
            (0, 0),
        ),
        ({"sys/mod.rs": "#[cfg(test)]\nmod tests;", "sys/tests.rs": "use crate::read::b::C;", "read/b.rs": ""}, (0, 0)),
        ({"sys/a.rs": "use super::b::C;", "sys/b.rs": "use super::{c::E, a::{D, F as G}};", "sys/c.rs": ""}, (0, 1)),
        ({"sys/mod.rs": "pub mod a; use self::a::C;", "sys/a.rs": "use super::D;"}, (0, 1)),
        ({"sys/mod.rs": "mod a; pub use a::C;", "sys/a.rs": "use super::D;"}, (0, 1)),
        ({"sys/mod.rs": "mod a; fn f() { a::g() }", "sys/a.rs": "fn g() { super::h() }"}, (0, 1)),
        ({"sys/mod.rs": "pub mod a; pub mod b;", "sys/a.rs": "use super::D;", "sys/b.rs": "use super::a::C;"}, (0, 0)),
    ],
)
def test_the_lint_sees(tmp_path, files, wrong):
    folders = {f"{name.partition('/')[0]}/mod.rs": "" for name in files}
    for name, text in {"lib.rs": "pub mod sys;", **folders, **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = graph(tmp_path)
    assert (len(upward(found)), len(circles(found))) == wrong
