"""Teams of ranks, which exchange pieces before writing and after reading, and the grains of a file."""

import os

import pytest
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from harness.parallel import dist, distribute_tensor, init_device_mesh, torch

RANKS = 4
#: The only shard has eight tensors of 512 KiB, spread by rows: 128 KiB of each on a rank.
TENSORS, ROWS, WIDTH = 8, 128, 1024


def full():
    values = torch.arange(TENSORS * ROWS * WIDTH, dtype=torch.float32).reshape(TENSORS, ROWS, WIDTH)
    return {f"w{at}": values[at] for at in range(TENSORS)}


def spread(*, filled):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = full() if filled else {name: torch.zeros_like(value) for name, value in full().items()}
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}


def save_and_load(path, variables):
    os.environ.update({name: value for name, value in variables.items() if dist.get_rank() == 0})
    saved = distributed.save(spread(filled=True), path, ranks=distributed.Ranks(timeout=60))
    into, reports = spread(filled=False), []
    distributed.load(path, into=into, io=fastckpt.IO("threads", on_report=reports.append))
    first = ROWS // RANKS * dist.get_rank()
    right = all(
        torch.equal(into[name].to_local(), value[first : first + ROWS // RANKS]) for name, value in full().items()
    )
    return saved, reports[0], right


def reports(forge, tmp_path, variables):
    fastckpt.save(full(), tmp_path / "one")
    with forge.group(RANKS) as group:
        found = group.run(save_and_load, tmp_path / "many", variables)
    assert all(right for _, _, right in found)
    (shard,) = (tmp_path / "one").glob("*.safetensors")
    assert (tmp_path / "many" / shard.name).read_bytes() == shard.read_bytes()
    return [saved for saved, _, _ in found], [loaded for _, loaded, _ in found]


def test_the_environment_of_rank_0_makes_a_team_of_all(forge, tmp_path):
    saves, loads = reports(forge, tmp_path, {"FASTCKPT_AGGREGATE": "4", "FASTCKPT_GRAIN": "65536"})
    total = TENSORS * ROWS * WIDTH * 4
    for saved in saves:
        assert (saved.team, saved.grain, saved.peers) == (4, 65536, 3)
        # Each rank writes two whole tensors, three quarters of which come from other ranks, up to a grain.
        assert abs(saved.bytes - total // 4) <= 65536 + 4096
        assert abs(saved.bytes_received - total // 4 * 3 // 4) <= 65536
    assert sum(loaded.bytes_storage for loaded in loads) == total


def test_pairs_send_nothing_to_others_but_the_edges_of_grains(forge, tmp_path):
    saves, _ = reports(forge, tmp_path, {"FASTCKPT_AGGREGATE": "2", "FASTCKPT_GRAIN": "4096"})
    total = TENSORS * ROWS * WIDTH * 4
    for saved in saves:
        assert saved.team == 2
        assert abs(saved.bytes_received - total // 4 // 2) <= TENSORS * 4096


@pytest.mark.parametrize("variables", [{}, {"FASTCKPT_AGGREGATE": "off"}, {"FASTCKPT_AGGREGATE": "1"}])
def test_on_a_file_system_of_this_machine_each_writes_what_it_has(forge, tmp_path, variables):
    saves, _ = reports(forge, tmp_path, variables)
    for saved in saves:
        assert saved.team == 1
        assert saved.bytes_received <= 65536 * TENSORS


def save_with(path, name, value):
    os.environ[name] = value
    distributed.save(spread(filled=True), path, ranks=distributed.Ranks(timeout=60))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FASTCKPT_AGGREGATE", "many", "`auto`, `off` or a number of ranks"),
        ("FASTCKPT_GRAIN", "5000", "a power of two from 4096 to 67108864, in bytes"),
    ],
)
def test_a_variable_that_says_nothing_is_named_on_all_ranks(forge, tmp_path, name, value, words):
    with forge.group(2) as group:
        group.start(save_with, tmp_path / "c", name, value)
        outcomes = group.outcomes()
    for outcome in outcomes:
        assert outcome.kind == "raised"
        assert f"{name}: `{value}` is not {words}" in outcome.raised.text
    assert not list(tmp_path.iterdir())
