"""The programs in docs/guides, unchanged, in processes that a test may end at a step."""

from __future__ import annotations

import os
import runpy
import signal
import warnings
from pathlib import Path
from typing import Any

import fastckpt


def run(program: str, folder: str, strikes: dict[int, int] | None = None) -> list[int]:
    """Run a program in a folder, and return the steps at which it asked whether to save.

    Args:
        program: the text of the program.
        folder: the current directory, which also has the script.
        strikes: the signals that this process gets, by the step at whose end it gets them.
    """
    os.chdir(folder)
    # The other environment variables that torchrun sets.
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], TORCHELASTIC_RUN_ID="guide")
    script = Path(folder, f"train-{os.getpid()}.py")
    script.write_text(program, encoding="utf-8")
    asked: list[int] = []

    class Manager(fastckpt.Manager):
        def should_save(self, step: int) -> bool:
            number = None if step in asked else (strikes or {}).get(step)
            asked.append(step)
            if number == signal.SIGKILL:
                self.wait()  # so that the run can resume from a checkpoint
                os.kill(os.getpid(), number)
            wanted = super().should_save(step)
            if number is not None:
                os.kill(os.getpid(), number)  # it comes after this boundary, and the next one answers it
            return wanted

        def save(self, step: int, *given: Any, **named: Any) -> bool:
            asked.append(step)
            return super().save(step, *given, **named)

    fastckpt.Manager = Manager  # type: ignore[misc]
    with warnings.catch_warnings():
        # Libraries give many warnings; a warning of fastckpt would be a fault of the recipe.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="fastckpt")
        runpy.run_path(str(script), run_name="__main__")
    return sorted(set(asked))


def shards(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of the shards of a checkpoint, by file name."""
    found = {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors")}
    assert found
    return found
