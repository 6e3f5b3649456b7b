"""Mutants: the product without one of its guards. The rows that name a mutant must catch it, or the campaign fails.

One copy of the sources has all mutants and is built once; an environment variable chooses the mutant. The copy is in
``target/`` and is never shipped. If a change of the product alters a patched line, making the copy fails.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
#: The variable that names the mutant.
SWITCH = "FASTCKPT_MUTANT"
CORE = "rust/fastckpt-core/src"
SWITCH_OF_RUST = f"""//! Whether a mutant is wanted.

/// Whether it is `name`.
#[must_use]
pub fn on(name: &str) -> bool {{
    std::env::var_os("{SWITCH}").is_some_and(|wanted| wanted == name)
}}

/// The same, at each second question.
#[must_use]
pub fn now_and_then(name: &str) -> bool {{
    static ASKED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    on(name) && ASKED.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 2 == 0
}}
"""


class Patch(NamedTuple):
    """A change of a file: ``old``, which occurs once, becomes ``new``, in which ``MUTANT`` is the condition."""

    file: str
    old: str
    new: str


def _core(file: str, old: str, new: str) -> Patch:
    return Patch(f"{CORE}/{file}", old, new)


def _python(file: str, old: str, new: str) -> Patch:
    return Patch(f"python/fastckpt/{file}", old, new)


MUTANTS = {
    "a-shards-sync": _core(
        "sys/file.rs",
        "        retry_on_intr(|| fs::fdatasync(&self.cached))?;\n        if !is_in",
        '        if crate::mutant::now_and_then("a-shards-sync") {\n            return Ok(());\n        }\n'
        "        retry_on_intr(|| fs::fdatasync(&self.cached))?;\n        if !is_in",
    ),
    "manifest-sync": _core(
        "commit/workspace.rs",
        '            sync(file.as_fd()).map_err(Error::io("sync", path))?;',
        "            if !(MUTANT && path.ends_with(manifest::FILE)) {\n"
        '                sync(file.as_fd()).map_err(Error::io("sync", path))?;\n            }',
    ),
    "directory-sync": _core(
        "commit/content.rs",
        "    sync(directory)\n}",
        "    if MUTANT {\n        return Ok(true);\n    }\n    sync(directory)\n}",
    ),
    "parent-sync": _core(
        "commit/takeover.rs",
        '!sync(self.parent.as_fd()).map_err(Error::io("sync the directory", &self.parent_path))?;',
        '!(MUTANT || sync(self.parent.as_fd()).map_err(Error::io("sync", &self.parent_path))?);',
    ),
    "made-parents-sync": _core(
        "commit/parents.rs",
        '        sync(at.as_fd()).map_err(Error::io("sync the parent directory of", path))?;',
        "        if !MUTANT {\n"
        '            sync(at.as_fd()).map_err(Error::io("sync the parent directory of", path))?;\n        }',
    ),
    "empty-directory-sync": _core(
        "commit/parents.rs",
        "    if is_empty(at.as_fd()) {",
        "    if !MUTANT && is_empty(at.as_fd()) {",
    ),
    "acknowledged-early": _core(
        "commit/takeover.rs",
        "        self.own = None;\n        self.close_to_others(mode)?;\n",
        "        self.own = None;\n        self.close_to_others(mode)?;\n"
        "        if MUTANT {\n"
        '            let later = self.parent.try_clone().expect("a descriptor");\n'
        "            std::thread::spawn(move || {\n"
        "                std::thread::sleep(std::time::Duration::from_millis(300));\n"
        "                let _ = sync(later.as_fd());\n"
        "            });\n"
        "            let in_two_steps = done.in_two_steps;\n"
        "            return Ok((done, Displaced { workspace: self, found: displaced, in_two_steps }));\n        }\n",
    ),
    "replaced-goes-first": _core(
        "commit/takeover.rs",
        "        self.own = None;\n",
        "        self.own = None;\n"
        "        if let Some((name, id)) = displaced.as_ref().filter(|_| MUTANT) {\n"
        "            let _ = remove(self.parent.as_fd(), name, *id, None);\n        }\n",
    ),
    "completion-length": _core(
        "engine/worker.rs",
        "            Ok(moved) => {\n                transfer.advance(moved);",
        "            Ok(moved) => {\n                let moved = if MUTANT { missing } else { moved };\n"
        "                transfer.advance(moved);",
    ),
    "failed-write": _core(
        "engine/worker.rs",
        "                _ => Err(error),\n            },\n        }\n    }\n\n    /// Hands a block",
        "                _ if MUTANT => {\n                    transfer.advance(missing);\n"
        "                    Ok(true)\n                }\n"
        "                _ => Err(error),\n            },\n        }\n    }\n\n    /// Hands a block",
    ),
    "failed-sync": _core(
        "sys/file.rs",
        "    retry_on_intr(|| fs::fsync(fd))?;\n    if is_in",
        "    retry_on_intr(|| fs::fsync(fd)).or_else(|error| if MUTANT { Ok(()) } else { Err(error) })?;\n    if is_in",
    ),
    "checksum": _core(
        "read/job.rs",
        "            Some(wanted) if wanted != found =>",
        "            Some(wanted) if wanted != found && !MUTANT =>",
    ),
    "message-sum": _core(
        "ranks/mail.rs",
        "        if found.to_le_bytes() == arrived.sum {",
        "        if MUTANT || found.to_le_bytes() == arrived.sum {",
    ),
    "lock": _core(
        "commit/owner.rs",
        "        Err(error) if lock::is_taken(&error) => return (Life::Alive, None),",
        "        Err(error) if lock::is_taken(&error) && !MUTANT => return (Life::Alive, None),\n"
        "        Err(error) if lock::is_taken(&error) => return (Life::Dead, None),",
    ),
    "word-sum": _python(
        "_ranks/words.py",
        '    if _crc64.of(content).to_bytes(SUM, "little") != sum_:',
        '    if _crc64.of(content).to_bytes(SUM, "little") != sum_ and not MUTANT:',
    ),
    "retention-goes-first": _python(
        "_manager/saves.py",
        "        try:\n            if self.asynchronous:\n                self._save_async(given, base, plan)",
        "        if MUTANT:\n"
        "            place = self.candidates.local.place\n"
        "            for step in place.look().steps:\n"
        "                place.remove(step, ())\n"
        "        try:\n            if self.asynchronous:\n                self._save_async(given, base, plan)",
    ),
    "replicas": _python(
        "_ranks/replicas.py",
        "    return [number for number, _, sums in offer if len(sums) > 1]",
        "    return [number for number, _, sums in offer if len(sums) > 1 and not MUTANT]",
    ),
}


def question(name: str, file: str) -> str:
    """Return the code of the condition that the mutant is chosen."""
    if file.endswith(".rs"):
        return f'crate::mutant::on("{name}")'
    return f'(__import__("os").environ.get("{SWITCH}") == "{name}")'


def patched() -> dict[str, str]:
    """Return the texts of the patched files of the copy.

    Raises:
        AssertionError: a line to patch is missing, or not unique.
    """
    found: dict[str, str] = {}
    for name, patch in MUTANTS.items():
        text = found.get(patch.file) or (ROOT / patch.file).read_text(encoding="utf-8")
        if text.count(patch.old) != 1:
            raise AssertionError(f"mutant {name}: {patch.file} has {text.count(patch.old)} times:\n{patch.old}")
        found[patch.file] = text.replace(patch.old, patch.new.replace("MUTANT", question(name, patch.file)))
    lib = f"{CORE}/lib.rs"
    text = (ROOT / lib).read_text(encoding="utf-8")
    found[lib] = text.replace("\npub mod probe;", "\n#[allow(missing_docs)]\npub mod mutant;\npub mod probe;")
    found[f"{CORE}/mutant.rs"] = SWITCH_OF_RUST
    return found


def _write(path: Path, content: bytes) -> None:
    # Unchanged files keep their times, so that nothing is built again.
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _bring(copy: Path) -> None:
    """Copy the sources, and patch them."""
    command = ["git", "-C", str(ROOT), "ls-files", "rust", "python", "Cargo.toml", "Cargo.lock"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    changed = patched()
    for name in {*listed, *changed}:
        if name in changed:
            _write(copy / name, changed[name].encode())
        elif (ROOT / name).exists():
            _write(copy / name, (ROOT / name).read_bytes())
    # Remove the files that the product no longer has.
    for folder in ("rust", "python"):
        for path in (copy / folder).rglob("*"):
            name = path.relative_to(copy).as_posix()
            if path.suffix in {".rs", ".py"} and name not in changed and not (ROOT / name).exists():
                path.unlink()


def _build(copy: Path, core: Path) -> None:
    # This profile is quick to build, and its code is fast enough.
    quick = {"LTO": "off", "CODEGEN_UNITS": "16", "OPT_LEVEL": "2"}
    env = os.environ | {f"CARGO_PROFILE_RELEASE_{name}": value for name, value in quick.items()}
    done = subprocess.run(
        ["cargo", "build", "--release", "--quiet", "--offline", "-p", "fastckpt-py"],
        cwd=copy,
        env=env | {"CARGO_TARGET_DIR": str(TARGET)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"the mutants do not build:\n{done.stderr[-4000:]}")
    new = core.with_suffix(".new")
    shutil.copyfile(TARGET / "release" / "lib_core.so", new)
    new.replace(core)


@cache
def built() -> Path:
    """Make and build the copy if it is missing or old; return the directory of its Python package.

    Raises:
        AssertionError: the copy cannot be built.
    """
    copy = TARGET / "faults" / "mutated"
    copy.mkdir(parents=True, exist_ok=True)
    with (copy / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _bring(copy)
        core, stamp = copy / "python" / "fastckpt" / "_core.abi3.so", copy / ".built"
        sources = sorted([*copy.glob("rust/**/*.rs"), *copy.glob("**/Cargo.*")])
        now = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
        # Without this stamp, Cargo would rebuild whenever its environment differs.
        if not core.exists() or not stamp.exists() or stamp.read_text(encoding="ascii") != now:
            _build(copy, core)
            stamp.write_text(now, encoding="ascii")
    return copy / "python"
