"""Tests which reader reads which checkpoint: each library writes its kind, and each reader tries each kind.

    PYTHONPATH=python:tests python tests/integrations/formats.py

writes the table into docs/migrate/formats.md; a test compares the two.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import trainers
from transformers import AutoModelForCausalLM

import fastckpt
from harness import cli, groups, looks, pages

PAGE = "docs/migrate/formats.md"
#: The table within the page.
PLACE = re.compile(r"(?<=<!-- the table of tests/integrations/formats.py -->\n).*?(?=<!-- its end -->)", re.DOTALL)


def state() -> dict[str, Any]:
    """Return a model with its optimizer, after a step, and a number."""
    model = trainers.model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def _files() -> dict[str, str]:
    return {"config.json": trainers.model_of().config.to_json_string()}


def _one_file(saved: Any, path: str) -> None:
    with fastckpt.open_write(path) as file:
        torch.save(saved, file)


def _model(saved: Any, path: str) -> None:
    model = trainers.model_of()
    model.load_state_dict(saved["model"])
    model.save_pretrained(path)


#: The writers of each kind; those in ``TOGETHER`` run on all ranks.
WRITERS = {
    "`fastckpt.save`": lambda saved, path: fastckpt.save(saved, path, files=_files()),
    "`fastckpt.distributed.save`, 2 ranks": lambda saved, path: fastckpt.distributed.save(saved, path, files=_files()),
    "`dcp.save` with `fastckpt.dcp.Writer`": lambda saved, path: dcp.save(
        saved, checkpoint_id=path, storage_writer=fastckpt.dcp.Writer()
    ),
    "`open_write` and `torch.save`": _one_file,
    "`torch.save`": torch.save,
    "`dcp.save`": lambda saved, path: dcp.save(saved, checkpoint_id=path),
    "safetensors' `save_file`": lambda saved, path: safetensors.torch.save_file(_untied(saved["model"]), path),
    "`save_pretrained`": _model,
}
TOGETHER = {name for name in WRITERS if "distributed" in name or "dcp" in name}


def _untied(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.items() if name != "lm_head.weight"}


def write(folder: str) -> None:
    """Write each kind, as one of two ranks."""
    os.chdir(folder)
    saved = state()
    for number, (name, writer) in enumerate(WRITERS.items()):
        if name in TOGETHER or os.environ["RANK"] == "0":
            writer(saved, f"kind-{number}")


# Each reader returns the part of the state that it finds, by names or keys.


def _load(path: str) -> Any:
    return fastckpt.load(path)


def _import(path: str) -> Any:
    with looks.forked(), contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        if cli.main(["import", path, f"{path}-imported"]):
            raise ValueError(said.getvalue())
    return fastckpt.load(f"{path}-imported")


def _torchs(path: str) -> Any:
    return torch.load(path, weights_only=True)


def _zeros() -> Any:
    empty = state()
    for part in (empty["model"], *empty["optimizer"]["state"].values()):
        for tensor in part.values():
            tensor.zero_()
    return {**empty, "step": 0}


def _dcp(path: str) -> Any:
    found = _zeros()
    dcp.load(found, checkpoint_id=path)
    return found


def _dcp_installed(path: str) -> Any:
    with fastckpt.dcp.install():
        return _dcp(path)


def _safetensors(path: str) -> Any:
    files = [*Path(path).rglob("*.safetensors")] if Path(path).is_dir() else [path]
    if not files:
        raise ValueError("it has no file of safetensors")
    found = {}
    for file in files:
        found |= safetensors.torch.load_file(file)
    return found


def _pretrained(path: str) -> Any:
    model, about = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    if about["missing_keys"] or about["unexpected_keys"]:
        raise ValueError(about)
    return model.state_dict()


#: The portable reader reads all kinds in one separate process.
READERS = {
    "`fastckpt.load`": _load,
    "the Python reader": None,
    "`fastckpt import`": _import,
    "`torch.load`": _torchs,
    "`dcp.load`": _dcp,
    "`dcp.load` after `fastckpt.dcp.install()`": _dcp_installed,
    "safetensors": _safetensors,
    "transformers": _pretrained,
}


def _by_python(kinds: list[str]) -> dict[str, Any]:
    """Return the tensors that the portable reader finds, for each kind that it reads."""
    program = """
from harness import portable
import fastckpt, pickle, sys
found = {}
for kind in sys.argv[1:]:
    try:
        found[kind] = fastckpt.load(kind, framework="numpy")
    except fastckpt.exceptions.NotACheckpointError:
        pass
pickle.dump(found, sys.stdout.buffer)
"""
    done = subprocess.run([sys.executable, "-c", program, *kinds], capture_output=True, check=True)
    return dict(pickle.loads(done.stdout))


def _tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in a state, by joined keys."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return {name: torch.as_tensor(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, one in items:
        found |= _tensors(one, f"{name}.{key}" if name else str(key))
    return found


def extent(found: Any, wanted: Any) -> str:
    """Return which part of a state was found, bit for bit."""
    ours, theirs = _tensors(wanted), _tensors(found)
    # A file with only the model has the model's names; for tied tensors, one name is enough.
    model = {name.removeprefix("model."): tensor for name, tensor in ours.items() if name.startswith("model.")}
    rest = {name: tensor for name, tensor in ours.items() if not name.startswith("model.")}

    def has(some: dict[str, torch.Tensor]) -> bool:
        def one(name: str, tensor: torch.Tensor) -> bool:
            return name in theirs and torch.equal(theirs[name], tensor)

        return all(one(name, tensor) or name.endswith("lm_head.weight") for name, tensor in some.items())

    if has(ours) and found.get("step") == wanted["step"]:
        return "all"
    if has(model):
        return "tensors" if has(rest) else "model"
    raise AssertionError(f"something else was read: {sorted(theirs)}")


def read(folder: str) -> list[list[str]]:
    """Return the part that each reader finds in each kind."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    wanted = state()
    kinds = [f"kind-{number}" for number in range(len(WRITERS))]
    by_python = _by_python(kinds)

    def one(kind: str, reader: Callable[[str], Any] | None) -> str:
        try:
            found = by_python[kind] if reader is None else reader(kind)
        except (Exception, dcp.api.CheckpointException):  # noqa: BLE001 - whatever a reader says
            return "no"
        return extent(found, wanted)

    return [[one(kind, reader) for reader in READERS.values()] for kind in kinds]


def table(libraries: Any, folder: Path) -> str:
    """Return the table in the form of the page."""
    with libraries.group(2, backend="gloo") as group:
        group.run(write, str(folder), timeout=120)
    with libraries.group(1, backend="") as group:
        (rows,) = group.run(read, str(folder), timeout=240)
    head = f"| written by | {' | '.join(READERS)} |"
    lines = [head, "|---" * (len(READERS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in zip(WRITERS, rows, strict=True)]
    return "\n".join(["", *lines, "", ""])


def main() -> None:
    """Write the table into the page."""
    with tempfile.TemporaryDirectory() as folder, groups.frameworks() as libraries:
        found = table(libraries, Path(folder))
    (pages.ROOT / PAGE).write_text(PLACE.sub(lambda _: found, pages.text(PAGE)), encoding="utf-8")


if __name__ == "__main__":
    importlib.import_module("formats").main()  # under the name by which ranks find it
