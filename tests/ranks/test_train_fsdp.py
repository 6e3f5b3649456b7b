"""The example under torchrun: four ranks, one killed, resumed by four and by two, against an undisturbed run."""

from __future__ import annotations

import os
import re
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

# One rank kills itself in the step that it is told, before the others can know: the last save is then of step 8.
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


def run(out: Path, ranks: int, *more: str, program: Path = EXAMPLE, before: tuple[str, ...] = ()) -> tuple[int, str]:
    options = f"--steps {STEPS} --save-every {SAVE_EVERY} --keep 2 --batch 8 --context 24 --width 32 --timeout 60"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, str(program), *before, *options.split(), "--out", str(out), "--losses", f"{out}.losses", *more],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def losses(out: Path) -> list[tuple[int, float]]:
    lines = Path(f"{out}.losses").read_text(encoding="ascii").splitlines()
    return [(int(step), float.fromhex(loss)) for step, loss in (line.split() for line in lines)]


@pytest.fixture
def killed(tmp_path):
    """A run of four ranks of which one was killed after the save of step 8, in an ``out`` of its own."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED, encoding="ascii")

    def go(*more):
        out = tmp_path / "killed"
        status, printed = run(out, 4, *more, program=program, before=(str(EXAMPLE),))
        assert status != 0
        assert "Signal 9" in printed
        assert fastckpt.verify(out / "step-000008").ok
        assert not (out / "step-000012").exists()
        return out

    return go


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_resumes_bit_for_bit(tmp_path, killed):
    # Dropout makes the state of each rank's generator matter.
    whole = tmp_path / "whole"
    status, printed = run(whole, 4, "--dropout", "0.2")
    assert status == 0, printed
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    out = killed("--dropout", "0.2")
    before = losses(out)
    assert before == expected[: len(before)]
    assert len(before) >= 8
    status, printed = run(out, 4, "--dropout", "0.2", "--resume")
    assert status == 0, printed
    assert re.search(r"resumed from .*step-000008 with 4 ranks", printed)
    assert losses(out)[len(before) :] == expected[8:]
    ends = [
        {each.name: each.read_bytes() for each in (run / "step-000012").glob("*.safetensors")} for run in (whole, out)
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) >= 2


@pytest.mark.slow
def test_two_ranks_go_on_where_four_were(tmp_path, killed):
    whole = tmp_path / "whole"
    status, printed = run(whole, 4)
    assert status == 0, printed
    out = killed()
    before = losses(out)
    status, printed = run(out, 2, "--resume")
    assert status == 0, printed
    assert re.search(r"resumed from .*step-000008 with 2 ranks", printed)
    found, expected = losses(out)[len(before) :], losses(whole)[8:]
    assert [step for step, _ in found] == [step for step, _ in expected]
    # Another order of the sums, nothing else; an optimizer without its moments is off by far more.
    for (_, loss), (_, wanted) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-4)
