"""Runs of a training program: how a run begins, how a test starts it, and how tests compare two runs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path

import torch

import fastckpt


def begin(folder):
    """Act as a process of torchrun in a folder, whose log keeps fastckpt's messages; return the folder."""
    folder = Path(folder)
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], TORCHELASTIC_RUN_ID="door")
    torch.set_num_threads(1)
    logging.getLogger("fastckpt").addHandler(logging.FileHandler(folder / "log.txt"))
    return folder


def digest(model):
    """Return a digest of the weights, and whether ranks have parts of them."""
    weights, spread = hashlib.sha256(), False
    for name, value in sorted(model.state_dict().items()):
        spread |= hasattr(value, "full_tensor")
        whole = value.full_tensor() if spread else value
        weights.update(name.encode() + whole.detach().numpy().tobytes())
    return weights.hexdigest(), spread


def strike(number):
    """Send this process a signal. Before SIGKILL, wait until its saves are durable, so that a run can resume."""
    if number == signal.SIGKILL:
        fastckpt.background.drain()
    os.kill(os.getpid(), number)


def adapted(model, *layers):
    """Return a model of which only the layers with these names are trained, with LoRA."""
    import peft  # takes 1.5 s, which processes without adapters need not spend

    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=[*layers]))


def play(program, libraries, folder, strike=None, *, ranks=1, **arguments):
    """Run a program in a folder on several ranks; return the outcome of each."""
    folder.mkdir(exist_ok=True)
    with libraries.group(ranks, backend="") as group:
        group.start(program, str(folder), strike, **arguments)
        return group.outcomes(120)


def ended(outcomes):
    """Return the result of the first rank; all ranks must succeed."""
    assert all(one.kind == "returned" for one in outcomes), outcomes
    return outcomes[0].value


def killed(program, libraries, folder, strike, *, ranks=1, **arguments):
    """Run a program that is killed on each rank."""
    outcomes = play(program, libraries, folder, strike, ranks=ranks, **arguments)
    assert [one.kind for one in outcomes] == ["died"] * ranks, outcomes


def undisturbed(program, libraries, make_folder):
    """Return a function that returns the result of an undisturbed run, and runs it once for each set of arguments."""
    known = {}

    def run(*, ranks=1, **arguments):
        key = json.dumps([ranks, arguments], sort_keys=True)
        if key not in known:
            known[key] = ended(play(program, libraries, make_folder("undisturbed"), ranks=ranks, **arguments))
        return known[key]

    return run


def script(folder, path, *arguments):
    """Run a program in a folder, as from a command line; return what it prints."""
    os.chdir(begin(folder))
    sys.argv = [path, *arguments]
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(path, run_name="__main__")
    return told.getvalue()
