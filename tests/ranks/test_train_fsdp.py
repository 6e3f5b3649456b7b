"""The example under torchrun: a run of four ranks, of which one is killed, is resumed by four and by two ranks.

torchrun starts the killed run. All other ranks are forked, because each would take seconds to import torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastckpt
from harness import needs

needs.of_torch(hasattr(torch.cpu.Stream, "record_event"), "training under fully_shard on the CPU")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
STEPS = 12
SAVE_EVERY = 4

# Rank 2 kills itself in step 10, before the others can notice, so the last save is of step 8.
KILLED = """
import os, runpy, signal, sys
import torch

rank, step = os.environ["RANK"], 0
real = torch.optim.AdamW.step

def counted(self, *args, **kwargs):
    global step
    step += 1
    if rank == "2" and step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args, **kwargs)

torch.optim.AdamW.step = counted
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def arguments(out: Path, *more: str) -> list[str]:
    options = f"--steps {STEPS} --save-every {SAVE_EVERY} --keep 2 --batch 8 --context 24 --width 32 --timeout 60"
    return [*options.split(), "--out", str(out), "--losses", f"{out}.losses", *more]


def run(out: Path, *more: str, program: Path = EXAMPLE, before: tuple[str, ...] = ()) -> tuple[int, str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, str(program), *before, *arguments(out, *more)],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _train(given: list[str]) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv = [str(EXAMPLE), *given]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.fixture
def forked(forge):
    """Run the example with forked ranks; return the output of rank 0."""

    def go(out, *more, ranks=4):
        with forge.group(ranks, backend="") as group:
            return group.run(_train, arguments(out, *more), timeout=240)[0]

    return go


@pytest.fixture
def whole(forked, tmp_path):
    """Run four ranks without a fault; return the run's ``out``."""

    def go(*more):
        out = tmp_path / "whole"
        forked(out, *more)
        assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
        return out

    return go


def losses(out: Path) -> list[tuple[int, float]]:
    lines = Path(f"{out}.losses").read_text(encoding="ascii").splitlines()
    return [(int(step), float.fromhex(loss)) for step, loss in (line.split() for line in lines)]


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_resumes_bit_for_bit(tmp_path, forked, whole):
    # With dropout, the state of each rank's generator matters.
    undisturbed = whole("--dropout", "0.2")
    expected = losses(undisturbed)
    out, program = tmp_path / "killed", tmp_path / "killed.py"
    program.write_text(KILLED, encoding="ascii")
    status, printed = run(out, "--dropout", "0.2", program=program, before=(str(EXAMPLE),))
    assert status != 0
    assert "Signal 9" in printed
    assert fastckpt.verify(out / "step-00000008").ok
    assert not (out / "step-00000012").exists()
    before = losses(out)
    assert before == expected[: len(before)]
    assert len(before) >= 8
    printed = forked(out, "--dropout", "0.2", "--resume")
    assert re.search(r"resumed from .*step-00000008 with 4 ranks", printed)
    assert losses(out)[len(before) :] == expected[8:]
    ends = [
        {each.name: each.read_bytes() for each in (run / "step-00000012").rglob("*.safetensors")}
        for run in (undisturbed, out)
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) >= 2


@pytest.mark.slow
def test_two_ranks_go_on_where_four_were(forked, whole):
    out = whole()
    expected = losses(out)
    shutil.rmtree(out / "step-00000012")
    printed = forked(out, "--resume", ranks=2)
    assert re.search(r"resumed from .*step-00000008 with 2 ranks", printed)
    found = losses(out)[STEPS:]
    assert [step for step, _ in found] == [step for step, _ in expected[8:]]
    # Only the order of sums differs; an optimizer without its moments would be off by far more.
    for (_, loss), (_, wanted) in zip(found, expected[8:], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-4)
