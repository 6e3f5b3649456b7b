"""Ranges in torch's profiler, and in NVTX where CUDA is in use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fastckpt


def names_in(profile):
    return {event.name for event in profile.events() if event.name.startswith("fastckpt.")}


def test_the_profiler_shows_what_the_caller_waits_for(tmp_path):
    state = {"w": torch.ones(1 << 16)}
    with torch.profiler.profile() as profile:
        fastckpt.save(state, tmp_path / "c")
        fastckpt.load(tmp_path / "c")
        fastckpt.save_async(state, tmp_path / "c").result(60)
    found = names_in(profile)
    assert found >= {"fastckpt.save", "fastckpt.load", "fastckpt.save_async", "fastckpt.stage"}


def test_ranges_end_with_an_error(tmp_path, monkeypatch):
    open_ranges = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_ranges.append)
    popped = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: popped.append(open_ranges[-1]))
    with pytest.raises(FileNotFoundError):
        fastckpt.load(tmp_path / "nothing")
    assert open_ranges == popped == ["fastckpt.load"]


def test_without_torch_there_is_no_range(tmp_path):
    code = """
import sys, numpy, fastckpt
fastckpt.save({"a": numpy.ones(3)}, sys.argv[1])
fastckpt.save_async({"a": numpy.ones(3)}, sys.argv[1]).result()
fastckpt.load(sys.argv[1])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=60)
