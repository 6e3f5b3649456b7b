"""Zygotes of one kind share only imports."""

from __future__ import annotations

import os
from pathlib import Path

import fastckpt
from harness import sharing, zygote


def seen(_channel, path):
    """Print a line, and return the settings of its zygote that a child sees."""
    print("printed", flush=True)
    fastckpt.save({"a": 1}, path)
    pages = [page.name.partition("-")[0] for page in Path(os.environ["FASTCKPT_TOP_DIR"]).iterdir()]
    return {"mine": os.environ.get("MINE"), "folder": str(Path.cwd()), "counted": str(os.getpid()) in pages}


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def is_gone(pid):
    """Whether a process has ended, even if the parent that adopted it has not reaped it yet."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_who_asks_has_a_zygote_of_its_own_with_what_is_imported_once(tmp_path, monkeypatch, capfd):
    zygotes = []
    with sharing.broker() as address:
        monkeypatch.setattr(zygote, "broker", address)
        more = (("three", {"FASTCKPT_TEST_IMPORT": "this"}), ("four", {zygote.MORE: "this"}))
        for name, kind in (("one", {}), ("two", {}), *more):
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            monkeypatch.setenv("MINE", name)
            with zygote.running(env=kind) as running:
                trunk = parent_of(running.process.pid)
                zygotes.append((running.process.pid, trunk, parent_of(trunk)))
                found = running.run("harness.test_sharing:seen", path=str(tmp_path / name / "c"))
            assert found == {"mine": name, "folder": str(tmp_path / name), "counted": True}
            told = capfd.readouterr().out
            assert "printed" in told
            # Output during a trunk's imports goes to the first process that asks for a zygote.
            assert ("Zen of Python" in told) == (name in ("three", "four"))
    pids, (first, second, third, fourth), above = zip(*zygotes, strict=True)
    assert len(set(pids)) == 4
    assert first == second
    assert len({first, third, fourth}) == 3
    # The trunk of a kind with more imports is forked from the other kind's trunk, and adds them.
    assert above[3] == first
    for ended in {*pids, first, third, fourth, *above}:
        assert is_gone(ended)


def test_a_zygote_under_a_command_of_its_own_is_not_shared(monkeypatch):
    monkeypatch.setattr(zygote, "broker", "/nowhere")
    with zygote.running("env", "MINE=1") as running:
        assert parent_of(running.process.pid) == os.getpid()
