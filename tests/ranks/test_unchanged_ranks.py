"""``distributed.save(..., base=...)``: all ranks together link and write the same files as one process."""

import errno
import hashlib
import json
import os
import socket

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastckpt
from fastckpt import distributed
from harness import groups, mounts, parallel, points
from harness.parallel import dist, torch

SPREAD = [
    *[("fsdp", 2, "sync"), ("fsdp", 4, "async"), ("tp", 2, "async"), ("tp_fsdp", 4, "sync"), ("ddp", 4, "sync")],
]
#: The values of the trained tensors in each save of a chain; the last save has the same state again.
CHAIN = (0, 1, 2, 2)


def local(value):
    return getattr(value, "_local_tensor", value).detach()


def train(state, number):
    """Change one layer's tensors and their moments, equally on all ranks."""
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


def save_chain(topology, folder, how):
    """Save the states of a chain, each with the previous checkpoint as its base. A block is a page, so that a tensor
    has many blocks."""
    os.environ["FASTCKPT_BLOCK_SIZE"] = "4096"
    state = parallel.state(topology, scale=4)
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
    """The SHA-256 and link count of each shard; the manifest's entries for shards, tensors and links."""
    files = {
        each.name: (hashlib.sha256(each.read_bytes()).hexdigest(), each.stat().st_nlink)
        for each in path.rglob("*.safetensors")
    }
    made = manifest(path)
    return files, made["shards"], made["tensors"], [each.get("links", 0) for each in made["saved"]["files"]]


@pytest.fixture(scope="module")
def alone(forge, tmp_path_factory):
    """The result of one process: the content of each checkpoint in a chain, and the reports."""
    folder = tmp_path_factory.mktemp("alone")
    with forge.group(1, backend="") as group:
        (reports,) = group.run(save_chain, "single", folder, "alone")
    # The second save detects unchanged tensors, the third save links them, and the fourth save links all files.
    assert [linked for _, linked, *_ in reports] == [0, 0, 2, 4]
    assert reports[3][0] == 0
    return [content(folder / str(step)) for step in range(len(CHAIN))], reports


@pytest.mark.parametrize(("topology", "size", "how"), SPREAD, ids=[f"{t}{n}-{how}" for t, n, how in SPREAD])
def test_ranks_link_and_write_what_one_process_does(lasting, tmp_path, alone, topology, size, how):
    with lasting(size) as group:
        ranks = group.run(save_chain, topology, tmp_path, how)
    contents, expected = alone
    assert [content(tmp_path / str(step)) for step in range(len(CHAIN))] == contents
    for step, (written, files, linked, warnings, _) in enumerate(expected):
        assert sum(reports[step][0] for reports in ranks) == written
        assert {reports[step][1:4] for reports in ranks} == {(files, linked, warnings)}
        assert ("compare" in ranks[0][step][4]) == (step > 0)
        assert fastckpt.verify(tmp_path / str(step)).ok


def save_stages(folder):
    """Save a chain of a pipeline whose ranks have different tensors and per-rank states."""
    state = parallel.state("pipeline", scale=4)
    reports = []
    for step, number in enumerate(CHAIN):
        train(state, number)
        base = {"base": folder / str(step - 1)} if step else {}
        own = {"random": torch.arange(2000.0) + dist.get_rank()}
        reports.append(distributed.save(state, folder / str(step), per_rank=own, **base))
    return [each.linked_files for each in reports], reports[-1].bytes_total


def test_stages_of_a_pipeline_link_what_has_not_changed(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_stages, tmp_path) == [([0, 0, 2, 4], 0)] * 2
    assert distributed.load_per_rank(tmp_path / "3", rank=1)["random"].tolist() == [1.0 + n for n in range(2000)]
    assert fastckpt.verify(tmp_path / "3").ok


def large(changed=None):
    """Tensors of several blocks, spread by rows, by columns and by both, and a replicated tensor."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    ways = [[Shard(0), Shard(0)], [Shard(1), Shard(1)], [Shard(0), Shard(1)], [Shard(1), Replicate()]]
    whole = torch.arange(1000 * 1637, dtype=torch.int32).view(1000, 1637)
    state = {f"w{number}": parallel.distributed(whole + number, mesh, way) for number, way in enumerate(ways)}
    state["all"] = whole.clone()
    for name, value in state.items():
        if changed == name and (name == "all" or dist.get_rank() == dist.get_world_size() - 1):
            local(value)[local(value).shape[0] // 2, -1] += 1
    return state


def save_large(folder, changed):
    size = {"files": fastckpt.Files(shard_size="1MB")}  # a file for each tensor
    distributed.save(large(), folder / "base", **size)
    same = distributed.save(large(), folder / "same", base=folder / "base", **size)
    other = distributed.save(large(changed), folder / "other", base=folder / "same", **size)
    return [(each.bytes_total, each.linked_files, each.bytes_sent) for each in (same, other)]


@pytest.mark.parametrize("changed", ["w1", "w2"])
def test_one_element_on_one_rank_is_found_and_nothing_else_is_written_or_travels(forge, tmp_path, changed):
    with forge.group(4) as group:
        found = group.run(save_large, tmp_path, changed)
    size = 1000 * 1637 * 4
    assert [same for same, _ in found] == [(0, 5, 0)] * 4
    assert [other[:2] for _, other in found] == [(size, 4)] * 4
    assert sum(other[2] for _, other in found) < size
    assert sorted(each.stat().st_nlink for each in (tmp_path / "other").rglob("*.safetensors")) == [1, 3, 3, 3, 3]
    assert fastckpt.verify(tmp_path / "other").ok
    same, other = (fastckpt.load(tmp_path / name) for name in ("same", "other"))
    assert [name for name in same if not torch.equal(same[name], other[name])] == [changed]


def save_step(topology, path, base, how="sync"):
    report = save(parallel.state(topology, scale=4), path, how, base=base)
    return report.bytes, report.linked_files, report.warnings


def test_a_base_may_be_of_any_number_of_ranks_and_of_one_process(forge, tmp_path):
    for number, (topology, size) in enumerate([("single", 1), ("fsdp", 4), ("tp", 2), ("ddp", 2), ("single", 1)]):
        base = tmp_path / str(number - 1) if number else None
        with forge.group(size, backend="" if size == 1 else "gloo") as group:
            how = "alone" if topology == "single" else "sync"
            expected = (0, 2, ()) if number else None
            for report in group.run(save_step, topology, tmp_path / str(number), base, how):
                assert expected in (None, report)
    assert {each.stat().st_nlink for each in tmp_path.glob("*/*.safetensors")} == {5}
    fastckpt.remove(tmp_path / "0")
    assert fastckpt.verify(tmp_path / "4").ok


def damage(path):
    """Change a byte of a checkpoint's file, whose time then shows the change."""
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_is_wrong_with_a_base_is_a_warning_of_all_ranks_and_all_is_written(forge, tmp_path):
    with forge.group(2) as group:
        first = group.run(save_step, "fsdp", tmp_path / "good", None)
        whole = sum(written for written, *_ in first)

        def check(name, words, linked):
            found = group.run(save_step, "fsdp", tmp_path / "c", tmp_path / name)
            assert {(linked, True)} == {(files, words in "".join(warnings)) for _, files, warnings in found}, found
            assert (sum(written for written, *_ in found) == whole) == (linked == 0)
            assert fastckpt.verify(tmp_path / "c").ok

        check("none", "No such file or directory", 0)
        (tmp_path / "empty").mkdir()
        check("empty", "is not a checkpoint", 0)
        check("good", "", 2)
        # A save does not inherit damage: it writes the file's tensors again. Here, both names of the file are damaged.
        damage(tmp_path / "good")
        check("good", "checksum is", 1)
        os.truncate(tmp_path / "good" / "model.safetensors", 5000)
        check("good", "bytes, expected", 1)


def test_a_base_on_another_file_system_is_a_warning(forge, tmp_path):
    with mounts.mount("tmpfs") as point, forge.group(2) as group:
        group.run(save_step, "fsdp", point / "base", None)
        for written, files, warnings in group.run(save_step, "fsdp", tmp_path / "c", point / "base"):
            assert written > 0
            assert files == 0
            assert "it is on another file system" in warnings[0]
    assert fastckpt.verify(tmp_path / "c").ok


def save_over(path):
    """Save repeatedly, each time with the checkpoint that is being replaced as the base."""
    state = parallel.state("fsdp", scale=4)
    found = []
    for number in CHAIN:
        train(state, number)
        found.append(distributed.save(state, path, base=path))
    with pytest.raises(FileExistsError if dist.get_rank() == 0 else fastckpt.exceptions.RanksError):
        distributed.save(state, path, base=path, overwrite=False)
    return [each.linked_files for each in found], ["base:" in "".join(each.warnings) for each in found]


def test_a_base_may_be_what_is_replaced(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_over, tmp_path / "c") == [([0, 0, 2, 4], [True, False, False, False])] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert {each.stat().st_nlink for each in tmp_path.glob("c/*.safetensors")} == {1}
    assert fastckpt.verify(tmp_path / "c").ok


FROZEN = ["model.blocks.0", "*.blocks.0.*exp_avg*"]


def save_frozen_alone(path):
    fastckpt.save(parallel.state("single", scale=4), path, files=fastckpt.Files(frozen=FROZEN))


def save_frozen(folder):
    state = parallel.state("fsdp", scale=4)
    distributed.save(state, folder / "0", files=fastckpt.Files(frozen=FROZEN))
    train(state, 5)
    report = distributed.save(state, folder / "1", base=folder / "0", files=fastckpt.Files(frozen=FROZEN))
    with pytest.raises(KeyError, match="frozen: 'modle' matches nothing"):
        distributed.save(state, folder / "2", files=fastckpt.Files(frozen="modle"))
    with pytest.raises((ValueError, fastckpt.exceptions.RanksError), match="base= differs between ranks"):
        distributed.save(state, folder / "2", base=folder / str(dist.get_rank()))
    return report.linked_files, report.bytes_total > 0


def test_what_is_named_frozen_is_linked_from_the_second_save_on(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_frozen, tmp_path) == [(2, True)] * 2
    with forge.group(1, backend="") as group:
        group.run(save_frozen_alone, tmp_path / "alone")
    files = [
        {each.name: each.read_bytes() for each in (tmp_path / name).rglob("*.safetensors")} for name in ("0", "alone")
    ]
    assert files[0] == files[1]


def save_on_hosts(folder):
    """Save with a different host name on each rank, so that ranks send each other the base's manifest."""
    socket.gethostname = lambda: f"node-{dist.get_rank()}"
    state = parallel.state("tp", scale=4)
    distributed.save(state, folder / "0")
    report = distributed.save(state, folder / "1", base=folder / "0")
    return report.linked_files, report.bytes_total, report.warnings


def test_the_manifest_of_a_base_travels_between_hosts(forge, tmp_path):
    with forge.group(4) as group:
        assert group.run(save_on_hosts, tmp_path) == [(2, 0, ())] * 4


def save_struck(folder, number, **options):
    """Like :func:`save_on_hosts`, but a rank may be struck."""
    socket.gethostname = lambda: f"node-{dist.get_rank()}"
    state = parallel.state("tp", scale=4)
    report = distributed.save(state, folder / str(number), ranks=distributed.Ranks(timeout=20), **options)
    return report.linked_files, report.warnings


#: The places at which a rank fails while ranks compare. Rank 3 waits for the manifest from rank 1.
BLOWS = [
    (1, points.PASS_BASE_ON, OSError(errno.EIO, "the blow")),
    (3, points.KNOW, OSError(errno.EIO, "the blow")),
    (2, points.COMPARE, OSError(errno.EIO, "the blow")),
    (3, points.COMPARE, KeyboardInterrupt("the blow")),
    (0, points.TAKE, OSError(errno.ENOSPC, "the blow")),
    (1, points.FOLLOW, OSError(errno.EIO, "the blow")),
]


def test_a_rank_that_fails_while_ranks_compare_fails_the_save_on_all_and_the_next_one_works(forge, tmp_path):
    with forge.group(4) as group:
        group.run(save_struck, tmp_path, 0)
        # The ranks have a gloo group, in which the failed save must not leave an incomplete broadcast.
        assert group.run(save_struck, tmp_path, 1, base=tmp_path / "0") == [(2, ())] * 4
        for step, (rank, where, error) in enumerate(BLOWS):
            strike = groups.Strike(rank, where, error)
            group.start(save_struck, tmp_path, 2, base=tmp_path / "1", strike=strike)
            ends = group.outcomes(timeout=60)
            assert [end.kind for end in ends] == ["raised"] * 4
            for end in ends:
                assert end.raised.kind == (type(error).__name__ if end.rank == rank else "RanksError"), end
                assert "the blow" in end.raised.text
            assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]
            options = {"base": tmp_path / "1", "metadata": {"step": step}}
            assert group.run(save_struck, tmp_path, 2, **options) == [(2, ())] * 4
            fastckpt.remove(tmp_path / "2")
