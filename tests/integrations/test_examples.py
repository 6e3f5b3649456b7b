"""The programs of examples/doors: each is short, and continues where it stopped.

The programs for Ray and vLLM, which the tests do not install, run against stand-ins (test_ray.py, test_vllm.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import zero

PROGRAMS = sorted(Path(__file__).parents[2].joinpath("examples", "doors").glob("*.py"))


def left(folder):
    """Return the files of a program, and their times."""
    return {path: path.stat().st_mtime_ns for path in folder.joinpath("runs").rglob("*") if path.is_file()}


HERE = [program for program in PROGRAMS if program.stem not in ("ray_train", "vllm_generate")]


@pytest.mark.parametrize("program", HERE, ids=[program.stem for program in HERE])
def test_a_program_goes_on_where_it_was(libraries, tmp_path, program):
    """A program that is started after its end does nothing; with more steps, it continues."""
    script = zero.script if program.stem == "deepspeed_loop" else runs.script

    def run(steps):
        with libraries.group(1, backend="") as group:
            (told,) = group.run(script, str(tmp_path), str(program), str(steps), timeout=120)
        return told.splitlines()[-1], left(tmp_path)

    told, first = run(20)
    assert (told, run(20)) == ("ended at step 20", (told, first))
    told, then = run(40)
    assert told == "ended at step 40"
    assert max(then.values()) > max(first.values())


def test_there_is_one_for_each_door_and_none_is_long():
    assert [program.stem for program in PROGRAMS] == [
        *(
            "accelerate_loop",
            "deepspeed_loop",
            "distributed_checkpoint",
            "fsspec_files",
            "lightning_trainer",
            "plain_loop",
        ),
        *("ray_train", "safetensors_file", "torch_checkpointing_loop", "torch_files", "torchtitan_loop", "trainer"),
        "vllm_generate",
    ]
    for program in PROGRAMS:
        assert len(program.read_text().splitlines()) <= 40, program
