"""Programs that save, drawn by a seed.

A program is a sequence of phases that follow one another on one disk. The processes of a phase end by themselves or are
killed, all at once or one rank before the others, and before the next phase the power may be cut. A phase is a list of
acts, and marks the beginning and the acknowledgement of each act.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import fastckpt
from fastckpt import distributed
from faults.simulated_mount import mark

#: Kinds of programs, and the frequency of each.
KINDS = {"saves": 4, "base": 3, "manager": 6, "tiers": 2, "copy": 2, "file": 1}
WITH_RANKS = {"saves by ranks": 1, "manager of ranks": 1}
ENGINES = ("auto", "threads", "buffered", "direct")
#: The file beside the shards, which contains its version.
BESIDE = "config.json"


def state(version: int, sizes: list[int]) -> dict[str, Any]:
    """Return a state that differs between versions, except for every third tensor."""
    model = {
        f"w{index}": np.arange(size, dtype=np.int32) + (0 if index % 3 == 1 else 1000 * version)
        for index, size in enumerate(sizes)
    }
    return {"model": model, "moment": np.full(sizes[0], version, np.float32), "version": version}


def file_of(version: int, sizes: list[int]) -> list[bytes]:
    """Return the content of a single file of a version."""
    return [np.full(size, version, np.int32).tobytes() for size in sizes]


def draw_program(seed: str, *, ranks: bool = False, kind: str = "") -> dict[str, Any]:
    """Return the program of a seed."""
    draw = random.Random(seed)
    kinds = WITH_RANKS if ranks else KINDS
    kind = kind or draw.choices(list(kinds), list(kinds.values()))[0]
    sizes = [draw.choice((3, 40, 700, 1500, 4000)) for _ in range(draw.randint(2, 4))]
    program = {
        "kind": kind,
        "sizes": sizes,
        "ranks": draw.randint(2, 4) if ranks else 1,
        "exchange": draw.random() < 0.6,
        "options": {"engine": draw.choice(ENGINES), "shard_size": draw.choice((2_000, 10_000, 10**6))},
        "phases": [],
    }
    for number in range(draw.choice((1, 2, 2, 3))):
        phase = {"acts": _acts(draw, kind, 100 * number), "kill": None, "reboot": None}
        if draw.random() < 0.6:
            phase["kill"] = draw.randint(1, 120)
        if draw.random() < 0.4:
            phase["reboot"] = draw.randrange(2**32)
        program["phases"].append(phase)
    return program


def _acts(draw: random.Random, kind: str, first: int) -> list[list[Any]]:
    versions = iter(range(first + 1, first + 100))
    if kind in {"saves", "saves by ranks"}:
        path = draw.choice(("c", "a/b/c"))
        acts: list[list[Any]] = [
            ["save", path, next(versions), {"background": draw.random() < 0.4, "beside": draw.random() < 0.4}]
            for _ in range(draw.randint(1, 3))
        ]
        if kind == "saves" and draw.random() < 0.3:
            acts.insert(draw.randint(1, len(acts)), ["remove", path])
        return acts
    if kind == "base":
        paths = ["one", "two", "three"]
        acts = []
        for number in range(draw.randint(2, 4)):
            base = draw.choice(paths[:number] or ["one"])
            acts.append(["save", paths[min(number, 2)], next(versions), {"base": base}])
        if draw.random() < 0.5:
            acts.append(["remove", draw.choice(paths[:2])])
        return acts
    if kind == "copy":
        names = ["far", "away/far"]
        return [act for _ in range(2) for act in (["save", "c", next(versions), {}], ["copy", "c", draw.choice(names)])]
    if kind == "file":
        return [["file", "one.file", next(versions)] for _ in range(3)]
    act: dict[str, Any] = {
        "keep": draw.choice((1, 2, 3)),
        "background": draw.random() < 0.5,
        "first": first,
        "saves": draw.randint(2, 5),
        "each": draw.random() < 0.5,
        "back": None,
        "pin": None,
        "remote": kind == "tiers",
    }
    if kind == "manager" and draw.random() < 0.4:
        act["back"] = [draw.randint(1, 3), draw.random() < 0.5]
    if kind == "manager" and draw.random() < 0.3:
        act["pin"] = draw.randint(0, 4)
    return [["manager", "run", act]]


def run(channel: Any, point: str, program: dict[str, Any], phase: int) -> None:
    """Run one phase, in a separate process."""
    del channel
    perform(point, program, phase)


def perform(point: str, program: dict[str, Any], phase: int) -> None:
    """Do the acts of a phase in this process or rank."""
    for name, *given in program["phases"][phase]["acts"]:
        # If a rank will be killed, the others need not wait long for it.
        patience = 3 if program["phases"][phase]["kill"] else 30
        ACTS[name](point, program | {"patience": patience}, *given)


def _options(program: dict[str, Any], version: int, *, beside: bool = False, io: bool = True) -> dict[str, Any]:
    given = program["options"]
    files = fastckpt.Files({BESIDE: f'{{"version": {version}}}'} if beside else None, shard_size=given["shard_size"])
    return {"files": files, **({"io": fastckpt.IO(given["engine"], threads=1)} if io else {})}


def _state(program: dict[str, Any], version: int) -> dict[str, Any]:
    whole = state(version, program["sizes"])
    if program["ranks"] == 1:
        return whole
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from harness import parallel

    mesh = init_device_mesh("cpu", (program["ranks"],))
    model = {
        name: parallel.distributed(torch.from_numpy(each), mesh, [Shard(0)]) for name, each in whole["model"].items()
    }
    return whole | {"model": model, "moment": torch.from_numpy(whole["moment"])}


def _save(point: str, program: dict[str, Any], path: str, version: int, how: dict[str, Any]) -> None:
    options = _options(program, version, beside=how.get("beside", False))
    if how.get("base"):
        options["base"] = f"{point}/{how['base']}"
    saved, place = _state(program, version), f"{point}/{path}"
    mark(point, event="begin", path=path.replace("/", "|"), version=version)
    if program["ranks"] > 1:
        ranks = distributed.Ranks(timeout=program["patience"])
        if how["background"]:
            distributed.save_async(saved, place, ranks=ranks, **options).result(30)
        else:
            distributed.save(saved, place, ranks=ranks, **options)
    elif how.get("background"):
        fastckpt.save_async(saved, place, **options).result(30)
    else:
        fastckpt.save(saved, place, **options)
    mark(point, event="ack", path=path.replace("/", "|"), version=version)


def _remove(point: str, program: dict[str, Any], path: str) -> None:
    del program
    mark(point, event="remove", path=path.replace("/", "|"))
    try:
        fastckpt.remove(f"{point}/{path}", files=[BESIDE])
    except FileNotFoundError:
        return
    mark(point, event="removed", path=path.replace("/", "|"))


def _copy(point: str, program: dict[str, Any], source: str, target: str) -> None:
    del program
    version = fastckpt.load(f"{point}/{source}")["version"]
    mark(point, event="begin", path=target.replace("/", "|"), version=version)
    fastckpt.copy(f"{point}/{source}", f"{point}/{target}", overwrite=True)
    mark(point, event="ack", path=target.replace("/", "|"), version=version)


def _file(point: str, program: dict[str, Any], path: str, version: int) -> None:
    mark(point, event="begin", path=path, version=version)
    with fastckpt.open_write(f"{point}/{path}", io=program["options"]["engine"]) as file:
        for piece in file_of(version, program["sizes"]):
            file.write(piece)
    mark(point, event="ack", path=path, version=version)


def _manage(point: str, program: dict[str, Any], path: str, act: dict[str, Any]) -> None:
    several = program["ranks"] > 1
    with fastckpt.Manager(
        f"{point}/{path}",
        ranks=distributed.Ranks(timeout=program["patience"]) if several else "alone",
        keep=act["keep"],
        async_save=act["background"],
        remote=f"{point}/remote" if act["remote"] else None,
        save_options=_options(program, 0),
    ) as manager:
        found = manager.restore()
        step = 0
        if found is not None:
            step = found.step
            mark(point, event="restored", run=path, step=step, version=int(found.state["version"]))
        if act["back"] is not None and found is not None:
            step = _go_back(point, path, manager, step, *act["back"])
        begun: list[tuple[int, int]] = []
        for number in range(1, act["saves"] + 1):
            step, version = step + 1, act["first"] + number
            mark(point, event="begin", run=path, step=step, version=version, keep=act["keep"])
            manager.save(step, _state(program, version), metrics={"loss": version})
            begun.append((step, version))
            if act["each"] or number == act["saves"]:
                manager.wait()
            if act["each"] or number == act["saves"] or not act["background"]:
                for place in begun:
                    mark(point, event="ack", run=path, step=place[0], version=place[1])
                begun.clear()
            if act["pin"] == number and not begun:
                manager.pin(step)
                mark(point, event="pinned", run=path, step=step)


def _go_back(point: str, path: str, manager: Any, step: int, by: int, discard: bool) -> int:
    older = [one for one in manager.steps() if one <= step]
    target = older[-min(by, len(older))]
    mark(point, event="back", run=path, step=target, discard=discard)
    found = manager.restore(step=target, discard_newer=discard)
    mark(point, event="went back", run=path, step=found.step, version=int(found.state["version"]), discard=discard)
    return target


ACTS = {"save": _save, "remove": _remove, "copy": _copy, "file": _file, "manager": _manage}
