"""A killed and resumed run of the example has the same losses as an uninterrupted run, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import needs, programs, zygote

if importlib.util.find_spec("torch") is None:
    needs.missing("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
STEPS = 48
SAVE_EVERY = 6


def command(out: Path, *more: str) -> list[str]:
    options = f"--steps {STEPS} --save-every {SAVE_EVERY} --keep 2 --batch 4 --context 48 --threads 1 --device cpu"
    return [sys.executable, str(EXAMPLE), *options.split(), "--out", str(out), "--losses", f"{out}.losses", *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def losses(out: Path) -> list[tuple[int, str]]:
    lines = Path(f"{out}.losses").read_text().splitlines()
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def steps_saved(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in out.glob("step-*"))


def run(children: zygote.Zygote, out: Path, *more: str) -> str:
    done = programs.run(children, command(out, *more)[1:], env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


# The program kills itself: on a busy machine, a kill by another process might come after its end.
KILLED = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

out, delay = Path(sys.argv[1]), float(sys.argv[2])
saved = lambda: sorted(path.name for path in out.glob("step-*"))

def kill(before):
    while saved() == before:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, args=[saved()], daemon=True).start()
sys.argv = sys.argv[3:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_and_kill(children: zygote.Zygote, out: Path, delay: float, *more: str) -> None:
    """Resume the run in ``out``; send SIGKILL ``delay`` seconds after the next checkpoint appears."""
    _, *arguments = command(out, "--resume", *more)
    script = out.with_name("killed.py")
    script.write_text(KILLED)
    done = programs.run(children, [script, out, str(delay), *arguments], env=environment())
    assert done.returncode == -signal.SIGKILL, "ended before it could be killed"


@pytest.fixture(scope="module")
def whole(children_with_torch: zygote.Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed run with synchronous saves; a run with asynchronous saves must compute the same."""
    out = tmp_path_factory.mktemp("undisturbed") / "whole"
    run(children_with_torch, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--async",)])
def test_killed_and_resumed_run_repeats_every_loss_bit_for_bit(
    children_with_torch: zygote.Zygote, tmp_path: Path, whole: Path, more: tuple[str, ...]
) -> None:
    killed = tmp_path / "killed"
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert all(float.fromhex(loss) > 0 for _, loss in expected)

    # The delays reach into the steps and the save that follow, but not to the end of the run.
    delays = [random.uniform(0, 0.15) for _ in range(2)]
    print(f"killing {delays} seconds after a checkpoint")
    for delay in delays:
        run_and_kill(children_with_torch, killed, delay, *more)
    printed = run(children_with_torch, killed, "--resume", *more)
    assert re.search(r"resumed from .*step-\d+", printed)

    found = losses(killed)
    assert set(found) == set(expected)
    # Only steps after the resumed checkpoint are computed again.
    assert found[-1][0] == STEPS
    assert len(found) < 2 * STEPS

    assert steps_saved(killed) == steps_saved(whole) == [STEPS - SAVE_EVERY, STEPS]
    assert [path.name for path in killed.iterdir() if path.name.startswith(".step")] == []


def test_an_existing_run_is_not_trained_over_without_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "step-00000010").mkdir(parents=True)
    done = subprocess.run(command(out), env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "--resume" in done.stderr
    assert list(out.iterdir()) == [out / "step-00000010"]


def test_a_resume_without_a_checkpoint_starts_from_the_beginning(
    children_with_torch: zygote.Zygote, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(children_with_torch, out, "--resume", "--steps", "2")
    assert [step for step, _ in losses(out)] == [1, 2]
    assert steps_saved(out) == [2]


def test_sigterm_ends_an_asynchronous_run_with_a_durable_checkpoint(
    children_with_torch: zygote.Zygote, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, "--async", "--steps", "5000", "--save-every", "1"), env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while len(steps_saved(out)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in out.iterdir() if path.name.startswith(".step") and "tmp" in path.name] == []
    printed = run(children_with_torch, out, "--async", "--resume", "--steps", str(steps_saved(out)[-1] + 2))
    assert "resumed from" in printed
