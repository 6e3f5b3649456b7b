"""``distributed.save(..., base=...)``: all ranks together link and write what one process would, whoever wrote the base."""

import hashlib
import json
import os

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastckpt
from fastckpt import distributed
from harness import mounts, parallel
from harness.groups import FailedError
from harness.parallel import dist, torch

SPREAD = [
    *[("fsdp", 2, "sync"), ("fsdp", 4, "async"), ("tp", 2, "async"), ("tp", 4, "sync"), ("tp_fsdp", 4, "sync")],
    *[("hsdp", 4, "sync"), ("ddp", 2, "async"), ("ddp", 4, "sync")],
]
#: What the trained tensors hold in each save of a chain: the last one saves the same state again.
CHAIN = (0, 1, 2, 2)
BLOCK = 4 << 20


def local(value):
    return getattr(value, "_local_tensor", value).detach()


def train(state, number):
    """Change the tensors of one layer and its moments, equally on all ranks."""
    parts = {"": state["model"], **state["optimizer"]["state"]}
    for name, part in parts.items():
        for key, value in part.items():
            if "blocks.1." in name + key:
                local(value).fill_(number)


def save(state, path, how, **options):
    if how == "alone":
        return fastckpt.save(state, path, **options)
    if how == "async":
        pending = distributed.save_async(state, path, **options)
        train(state, 99)
        return pending.result()
    return distributed.save(state, path, **options)


def save_chain(topology, folder, how, tied):
    """Save the states of a chain, each with the one before as its base; in blocks of a page, so that each tensor has
    many."""
    os.environ["FASTCKPT_BLOCK_SIZE"] = "4096"
    state = parallel.state(topology, tied=tied, scale=4)
    reports = []
    for step, number in enumerate(CHAIN):
        train(state, number)
        base = {"base": folder / str(step - 1)} if step else {}
        reports.append(save(state, folder / str(step), how, **base))
    return [(each.bytes, each.linked_files, each.linked_bytes, each.warnings, list(each.phases)) for each in reports]


def manifest(path):
    found = json.loads((path / "fastckpt.json").read_bytes())
    return found.get("body", found)


def content(path):
    """Each file of tensors and the number of its names; what the manifest says of files, tensors, and what vouches."""
    files = {
        each.name: (hashlib.sha256(each.read_bytes()).hexdigest(), each.stat().st_nlink)
        for each in path.glob("*.safetensors")
    }
    made = manifest(path)
    return files, made["shards"], made["tensors"], [each.get("links", 0) for each in made["saved"]["files"]]


@pytest.fixture(scope="module")
def alone(forge, tmp_path_factory):
    """What one process writes, with tied weights and without: the content of each checkpoint, and its report."""
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("alone")
        with forge.group(1, backend="") as group:
            (reports,) = group.run(save_chain, "single", folder, "alone", tied)
        found[tied] = [content(folder / str(step)) for step in range(len(CHAIN))], reports
    contents, reports = found[True]
    # The second save finds what does not change, the third links it, the fourth links all.
    assert [linked for _, linked, *_ in reports] == [0, 0, 2, 4]
    assert reports[3][0] == 0
    assert all(sum(names == 1 for _, names in files.values()) == own for (files, *_), own in zip(contents, (2, 2, 0, 0)))
    return found


@pytest.mark.parametrize(("topology", "size", "how"), SPREAD, ids=[f"{t}{n}-{how}" for t, n, how in SPREAD])
def test_ranks_link_and_write_what_one_process_does(forge, tmp_path, alone, topology, size, how):
    with forge.group(size) as group:
        ranks = group.run(save_chain, topology, tmp_path, how, True)
    contents, expected = alone[True]
    assert [content(tmp_path / str(step)) for step in range(len(CHAIN))] == contents
    for step, (written, files, linked, warnings, _) in enumerate(expected):
        assert sum(reports[step][0] for reports in ranks) == written
        assert {reports[step][1:4] for reports in ranks} == {(files, linked, warnings)}
        assert ("compare" in ranks[0][step][4]) == (step > 0)
        assert fastckpt.verify(tmp_path / str(step)).ok
