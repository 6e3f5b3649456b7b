"""Random generators of numpy and torch continue with the same numbers; no file makes them read out of bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError
from fastckpt.exceptions import UnsupportedTypeError
from harness import manifest

KINDS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def used(kind):
    """A generator in use, which keeps half a number and has made child generators."""
    generator = np.random.Generator(getattr(np.random, kind)(7))
    generator.random(5)
    generator.random(1, np.float32)
    generator.bit_generator.spawn(2)
    return generator


@pytest.mark.states("`numpy.random.Generator`, its bit generators, `RandomState`")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["auto", "torch", "numpy"])
def test_numpy_generators_go_on(tmp_path, kind, framework):
    generator, bits, legacy = used(kind), used(kind).bit_generator, np.random.RandomState(getattr(np.random, kind)(3))
    legacy.randn(3)
    fastckpt.save({"generator": generator, "bits": bits, "legacy": legacy}, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", framework=framework)
    assert [type(value) for value in loaded.values()] == [np.random.Generator, type(bits), np.random.RandomState]
    assert loaded["generator"].random(1, np.float32) == generator.random(1, np.float32)
    assert (loaded["generator"].random(2000) == generator.random(2000)).all()
    assert (loaded["bits"].random_raw(2000) == bits.random_raw(2000)).all()
    assert (loaded["legacy"].randn(2001) == legacy.randn(2001)).all()
    (child,), (known,) = loaded["generator"].bit_generator.spawn(1), generator.bit_generator.spawn(1)
    assert child.random_raw() == known.random_raw()


@pytest.mark.parametrize(
    "seed", [None, 0, 2**200, [1, 2**70], np.arange(4, dtype=np.uint64), np.int64(5), (1, 2)], ids=str
)
def test_seeds_of_any_kind(tmp_path, seed):
    generator = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(3, np.uint32(4)), pool_size=8))
    )
    fastckpt.save(generator, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded.bit_generator.spawn(1)[0].random_raw() == generator.bit_generator.spawn(1)[0].random_raw()
    assert loaded.random() == generator.random()


def test_a_pool_that_takes_minutes_to_mix_is_refused(tmp_path):
    seeds = np.random.SeedSequence(1, pool_size=300)
    with pytest.raises(UnsupportedTypeError, match="a pool of more than 256"):
        fastckpt.save(np.random.PCG64(seeds), tmp_path / "c")


def test_the_state_is_that_at_the_call(tmp_path):
    generator, drawn = used("Philox"), torch.Generator().manual_seed(1)
    state = {"numpy": generator, "torch": drawn}
    handle = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
    known = used("Philox").random(100)
    first = generator.random(100)
    second = torch.rand(100, generator=drawn)
    handle.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert (known == first).all()
    assert (loaded["numpy"].random(100) == first).all()
    assert torch.equal(torch.rand(100, generator=loaded["torch"]), second)


def patched(path, value, change):
    """Save ``value``, and let ``change`` edit its tokens, as one flat list."""
    fastckpt.save(value, path)
    body = manifest.body_of(path)
    change(body["structure"])
    manifest.forge(path, body)


def after(tokens, name, value, which=0):
    """Replace the token after the key ``name`` by ``value``."""
    places = [at for at, token in enumerate(tokens) if token == name]
    tokens[places[which] + 1] = value


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("MT19937", "pos", value) for value in (-1, 625, 10**8, 2**40, 1.0, True, None)),
        *(("Philox", "buffer_pos", value) for value in (-1, 5, 10**8, None)),
        *((kind, "has_uint32", 2) for kind in KINDS[1:]),
        *((kind, "uinteger", 2**32) for kind in KINDS[1:]),
        ("PCG64", "inc", -1),
        ("PCG64", "inc", ["int", hex(2**128)]),
        ("PCG64", "bit_generator", "MT19937"),
        ("PCG64", "bit_generator", "Generator"),
        ("PCG64", "bit_generator", ["list", 0]),
        ("PCG64", "pool_size", 2**40),
        ("PCG64", "pool_size", 1),
        ("PCG64", "n_children_spawned", -1),
        ("PCG64", "n_children_spawned", 2**33),
        ("PCG64", "entropy", -1),
        ("PCG64", "entropy", ["int", "0x" + "f" * 200_000]),
        ("PCG64", "entropy", "12"),
        ("PCG64", "spawn_key", 0),
        ("PCG64", "seed_sequence", 0),
        ("SFC64", "state", 0),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_hostile_states_of_numpy(tmp_path, kind, name, value, whole):
    generator = used(kind)
    patched(tmp_path / "c", generator if whole else generator.bit_generator, lambda tokens: after(tokens, name, value))
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


@pytest.mark.parametrize("kind", ["MT19937", "Philox", "SFC64"])
@pytest.mark.parametrize("instead", [np.zeros(3, np.uint64), np.zeros((2, 2), np.uint32), np.zeros(624), np.uint64(5)])
def test_hostile_arrays_in_states(tmp_path, kind, instead):
    fastckpt.save([used(kind), instead], tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    tokens = body["structure"]
    last = tokens.pop()
    tokens[0] = ["list", 1]
    tokens[next(at for at, token in enumerate(tokens) if token == ["array", 0])] = last
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


@pytest.mark.parametrize("value", [["float", "7ff8000000000000"], 1, None, "1"])
def test_hostile_normal_numbers(tmp_path, value):
    legacy = np.random.RandomState(1)
    patched(tmp_path / "c", legacy, lambda tokens: after(tokens, "gauss", value))
    if isinstance(value, list):  # NaN is a number, too
        assert np.isnan(fastckpt.load(tmp_path / "c").get_state()[4])
        return
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


@pytest.mark.states("`torch.Generator`")
@pytest.mark.parametrize("count", [0, 1, 5, 624, 2000])
def test_torch_generators_go_on(trip, count):
    generator = torch.Generator().manual_seed(11)
    torch.rand(count, generator=generator)
    torch.randn(1, generator=generator)
    loaded = trip({"generator": generator})["generator"]
    assert (type(loaded), loaded.device) == (torch.Generator, torch.device("cpu"))
    assert torch.equal(torch.randn(3000, generator=loaded), torch.randn(3000, generator=generator))


def test_a_generator_whose_device_is_not_here(tmp_path):
    fastckpt.save({"a": 1, "g": torch.Generator()}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    after(body["structure"], "device", "mps")
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(UnsupportedTypeError, match=r"generator of the device 'mps', which cannot be made here.*keys="):
        fastckpt.load(tmp_path / "c")
    assert fastckpt.load(tmp_path / "c", keys="a") == {"a": 1}
    plain = fastckpt.load(tmp_path / "c", framework="numpy")["g"]
    assert plain["device"] == "mps"
    assert plain["state"].shape == (5056,)


def positions(left, following):
    state = torch.Generator().get_state()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([following], dtype=torch.int64).view(torch.uint8)
    return state


@pytest.mark.parametrize(
    "state",
    [
        positions(0, 0),
        positions(-5, 0),
        positions(600, 26),
        positions(2, 624),
        positions(1, 625),
        positions(1, -1),
        torch.Generator().get_state()[:-1],
        torch.Generator().get_state()[:16],
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(5056, dtype=torch.uint8),
        torch.zeros(5056),
        torch.zeros(1, 5056, dtype=torch.uint8),
        None,
    ],
    ids=lambda state: None if state is None else f"{tuple(state.shape)}",
)
def test_hostile_states_of_torch(tmp_path, state):
    fastckpt.save([{"device": "cpu", "state": state}], tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"].insert(1, ["type", "torch.Generator"])
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


def test_the_last_number_of_a_state_may_be_next(tmp_path):
    generator = torch.Generator()
    generator.set_state(positions(1, 624))
    fastckpt.save(generator, tmp_path / "c")
    assert torch.equal(torch.rand(9, generator=fastckpt.load(tmp_path / "c")), torch.rand(9, generator=generator))


@pytest.mark.states("`torch.dtype`, `layout`, `memory_format`, `device`, `Size`")
@pytest.mark.parametrize(
    "value",
    [
        *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged),
        *(torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format),
    ],
    ids=str,
)
def test_layouts_and_memory_formats(tmp_path, value):
    fastckpt.save([value], tmp_path / "c")
    (loaded,) = fastckpt.load(tmp_path / "c")
    assert loaded is value
    (plain,) = fastckpt.load(tmp_path / "c", framework="numpy")
    assert f"torch.{plain}" == str(value)
    body = manifest.body_of(tmp_path / "c")
    assert body["structure"][1] == ["type", f"torch.{type(value).__name__}"]
    body["structure"][2] = "__name__"
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(UnsupportedTypeError, match="which this version of torch does not have"):
        fastckpt.load(tmp_path / "c")
