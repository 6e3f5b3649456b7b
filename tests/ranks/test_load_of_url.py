"""Ranks that load a checkpoint from an object store, alone and as the remote tier of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastckpt
from fastckpt import distributed
from harness import points
from harness import s3 as harness
from harness.reports import with_report

TIMEOUT = 60.0
SIZES = (1, 2, 4)
#: A tensor of several blocks, whose ends differ from those of the ranks' parts.
ROWS, COLUMNS = 4097, 700


def whole():
    dice = torch.Generator().manual_seed(0)
    return {
        "model": {"w": torch.randn(ROWS, COLUMNS, generator=dice), "b": torch.randn(7, generator=dice)},
        "step": 3,
    }


@pytest.fixture
def url(s3, tmp_path):
    """A checkpoint in the store."""
    fastckpt.save(whole(), tmp_path / "source")
    fastckpt.copy(tmp_path / "source", f"s3://{harness.BUCKET}/run/c")
    s3.forget()
    return f"s3://{harness.BUCKET}/run/c"


@pytest.fixture(params=SIZES)
def ranks(request, forge):
    with forge.group(request.param, backend="gloo" if request.param > 1 else "") as group:
        group.size = request.param
        yield group


def load(env, url, hosts, io="auto"):
    """The problems of this rank's loads, of spread and whole tensors, and facts from the report."""
    os.environ.update(env)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if hosts > 1:
        socket.gethostname = lambda: f"node{rank % hosts}"
    expected = whole()
    wrong = []
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        into = {"model": {"w": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)]), "b": torch.zeros(7)}}
        own = distribute_tensor(expected["model"]["w"], mesh, [Shard(0)]).to_local()
        loaded = with_report(distributed.load, url, into=into, keys="model", timeout=TIMEOUT, io=io)
        if not torch.equal(into["model"]["w"].to_local(), own) or not torch.equal(
            into["model"]["b"], expected["model"]["b"]
        ):
            wrong.append("into")
    else:
        loaded = with_report(distributed.load, url)
    found = distributed.load(url, ranks=distributed.Ranks(timeout=TIMEOUT))
    if found["step"] != 3 or not torch.equal(found["model"]["w"], expected["model"]["w"]):
        wrong.append("whole")
    return wrong, loaded.report.bytes_storage, loaded.report.bytes_peers, loaded.report.path


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_rank_reads_what_it_wants(ranks, s3, url, hosts):
    """Mutants: the load turns the URL into a path; ranks on several hosts exchange what they read."""
    total = ROWS * COLUMNS * 4
    seen = ranks.run(load, harness.environment(s3.url), url, hosts)
    assert [wrong for wrong, *_ in seen] == [[]] * ranks.size
    for _, read, passed, path in seen:
        assert (passed, path) == (0, url)
        # A rank reads its part, and the blocks that this shares with its neighbours.
        assert read <= total / ranks.size + 2 * (4 << 20) + 1000


def fail(env, url, kind):
    """Make a load fail in the way of `kind`; return this rank's error, and the step of a load that follows."""
    os.environ.update(env)

    def down(real):
        def read(objects, name, start, length):
            if name.endswith(".safetensors") and start > 100_000:
                raise OSError(errno.EIO, f"cannot read {name}: the network is down", name)
            return real(objects, name, start, length)

        return read

    struck = kind == "network" and dist.get_rank() == dist.get_world_size() - 1
    place = {"nothing": f"{url}/none", "damage": f"{url}-damaged"}.get(kind, url)
    try:
        with points.replaced(points.READ_OBJECT, down) if struck else contextlib.nullcontext():
            distributed.load(
                place, ranks=distributed.Ranks(timeout=TIMEOUT), io="direct" if kind == "direct" else "auto"
            )
    except Exception as error:  # noqa: BLE001 - what the test looks at
        heard = str(error)
    else:
        heard = ""
    # The next load works.
    return heard, distributed.load(url, ranks=distributed.Ranks(timeout=TIMEOUT))["step"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("network", "the network is down"),
        ("nothing", "nothing is there"),
        ("damage", "checksum"),
        ("direct", "direct I/O"),
    ],
)
def test_errors_reach_all_ranks(forge, s3, url, tmp_path, kind, text):
    if kind == "damage":
        fastckpt.copy(tmp_path / "source", f"{url}-damaged")
        objects = harness.objects(f"{url}-damaged")
        (shard,) = [name for name in objects.sizes() if name.endswith(".safetensors")]
        content = bytearray(objects.read_all(shard, 1 << 30))
        content[-1] ^= 1
        objects.write(shard, [content], len(content), objects.sum_of(shard))
    with forge.group(2) as group:
        seen = group.run(fail, harness.environment(s3.url), url, kind)
    assert [step for _, step in seen] == [3, 3]
    assert all(text in heard for heard, _ in seen), seen


def refused(url):
    with pytest.raises(ValueError, match="URL"):
        distributed.save({"w": np.ones(3)}, url, ranks=distributed.Ranks(timeout=TIMEOUT))


def test_a_save_to_a_url_is_refused_on_all_ranks(forge):
    with forge.group(2) as group:
        group.run(refused, "s3://bucket/x")


def state(step):
    return {"model": {f"w{index}": np.full(5000, step + index) for index in range(4)}, "step": step}


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def restore(env, root, remote, how):
    """Restore on a rank of a run; except for "empty", the local tier cannot be written."""
    os.environ.update(env)
    fetch = points.replaced(points.FETCH, lambda _: full) if how == "full" else contextlib.nullcontext()
    with fetch, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = fastckpt.Manager(
            root, remote=remote, read_only=how == "read_only", ranks=distributed.Ranks(timeout=TIMEOUT)
        )
        found = manager.restore()
        older = manager.restore(step=1)
    whole = all((found.state["model"][f"w{index}"] == 2 + index).all() for index in range(4))
    return found.step, found.state["step"], whole, str(found.path), found.metrics, older.state["step"]


@pytest.mark.parametrize("how", ["read_only", "full", "empty"])
def test_a_run_comes_back_from_the_store(ranks, s3, tmp_path, how):
    """A run can be restored without a disk, with a full disk, and on another node with an empty disk."""
    remote, local = f"s3://{harness.BUCKET}/runs/gpt", tmp_path / "local"
    with fastckpt.Manager(local, remote=remote, save_options={"files": fastckpt.Files(shard_size=40_000)}) as manager:
        for step in (1, 2):
            manager.save(step, state(step), {"loss": float(step)})
            manager.wait()
    shutil.rmtree(local)
    seen = ranks.run(restore, harness.environment(s3.url), tmp_path / "node", remote, how)
    place = str(tmp_path / "node") if how == "empty" else remote
    assert seen == [(2, 2, True, f"{place}/step-00000002", {"loss": 2.0}, 1)] * ranks.size
