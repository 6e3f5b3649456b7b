"""Small checkpoints that would take much: what a reader does, and what memory it takes, grow no faster than the file.

Each is forged behind a correct checksum, and its size is one at which the growth that it provokes would show beyond
doubt: minutes, or gigabytes.
"""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import json
import random
import struct

import pytest

import fastckpt
from harness import manifest, zygote

SECONDS = 10.0
GROWTH = 192 << 20


@pytest.fixture(scope="module")
def children():
    with zygote.running(env={"FASTCKPT_TEST_TORCH": "1"}) as running:
        yield running


@pytest.fixture
def forged(tmp_path):
    """A checkpoint of one array, and its manifest's body to spoil."""
    path = tmp_path / "step"
    return path, manifest.minimal(path, [("a", "U8", [4], b"data")])


def ended(children, path, operation="load", **options):
    """How an operation on ``path`` ended, in a process of its own; it had to be quick and small."""
    end = children.run("load_timed", path=str(path), operation=operation, timeout=120, **options)
    assert not isinstance(end, zygote.Raised), end
    assert end["seconds"] < SECONDS, end
    assert end["grown"] < GROWTH, end
    return end


# --- keys whose hashes collide ---------------------------------------------------------------------------------------

PERIOD = (1 << 61) - 1
MANY = 60_000


def _integer(value):
    return [value if abs(value) < 1 << 53 else ["int", f"{value:#x}"]]


def _float(value):
    return [["float", struct.pack(">d", value).hex()]]


def _walkers(bits):
    """Integers below 2^61, each of another hash, that Python inserts into a dict by long walks.

    The first ones take places that follow each other on the walk that is left when all bits of a hash are used up.
    The others are made so that every step before it leads to one of these places.
    """
    dice = random.Random(1)
    mask = (1 << bits) - 1
    places = [1]
    while len(places) < mask // 3:
        places.append((places[-1] * 5 + 1) & mask)
    taken = set(places)
    keys = dict.fromkeys(places)
    while len(keys) < mask * 2 // 3:
        value = at = dice.choice(places)
        for used in range(bits, 60, 5):
            low = value >> (used + 5 - bits)
            digits = [d for d in range(32) if (at * 5 + 1 + (low | d << (bits - 5))) & mask in taken]
            if not digits:
                break
            digit = dice.choice(digits)
            value |= digit << used
            at = (at * 5 + 1 + (low | digit << (bits - 5))) & mask
        else:
            keys[value] = None
    return list(keys)


def _token(key):
    """One key's tokens."""
    if isinstance(key, tuple):
        return [["tuple", len(key)], *(token for item in key for token in _token(item))]
    if isinstance(key, frozenset):
        return [["fset", len(key)], *(token for item in key for token in _token(item))]
    if isinstance(key, dt.timedelta):
        return [["timedelta", [key.days, key.seconds, key.microseconds]]]
    if isinstance(key, complex):
        return [["complex", struct.pack(">d", key.real).hex(), struct.pack(">d", key.imag).hex()]]
    if isinstance(key, float):
        return [["float", struct.pack(">d", key).hex()]]
    if isinstance(key, range):
        return [["range", *map(str, (key.start, key.stop, key.step))]]
    return [key if isinstance(key, str) or abs(key) < 1 << 53 else ["int", f"{key:#x}"]]


COLLIDING = {
    "integers": lambda: (number * PERIOD for number in range(MANY)),
    "negative integers": lambda: (-number * PERIOD - 5 for number in range(MANY)),
    "complex numbers": lambda: (complex(-1000003 * number, number) for number in range(MANY)),
    "tuples": lambda: (("x", number * PERIOD) for number in range(MANY)),
    "sets of tuples": lambda: (frozenset({("x", frozenset({number * PERIOD}))}) for number in range(MANY)),
    "ranges": lambda: (range(number * PERIOD, number * PERIOD + 2) for number in range(MANY)),
    "among others": lambda: [*range(MANY), *(number * PERIOD for number in range(1, MANY // 4))],
    "in a small table on the way to a large one": lambda: [
        *(number * PERIOD for number in range(MANY // 10)),
        *range(1, 3 * MANY),
    ],
    "different hashes": lambda: _walkers(15),
}
HOLDERS = {
    "dict": lambda keys: [["dict", len(keys)], *(token for key in keys for token in (*key, None))],
    "odict": lambda keys: [["odict", len(keys)], *(token for key in keys for token in (*key, None))],
    "ddict": lambda keys: [["ddict", len(keys)], "list", *(token for key in keys for token in (*key, None))],
    "set": lambda keys: [["set", len(keys)], *(token for key in keys for token in key)],
    "fset": lambda keys: [["fset", len(keys)], *(token for key in keys for token in key)],
}


def refused_for_its_keys(children, path):
    for operation in ("load", "open"):
        end = ended(children, path, operation)
        assert end["kind"] == "CorruptCheckpointError", end
        assert "collide" in end["text"], end


@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_that_collide_are_refused(children, forged, kind):
    path, body = forged
    body["structure"] = HOLDERS["dict"]([_token(key) for key in COLLIDING[kind]()])
    manifest.forge(path, body)
    refused_for_its_keys(children, path)


@pytest.mark.parametrize("holder", HOLDERS)
def test_every_holder_of_keys_refuses_them(children, forged, holder):
    path, body = forged
    body["structure"] = HOLDERS[holder]([_token(key) for key in COLLIDING["integers"]()])
    manifest.forge(path, body)
    refused_for_its_keys(children, path)


def test_keys_that_collide_in_metadata(children, forged, tmp_path):
    path, body = forged
    body["metadata"] = HOLDERS["set"]([_token(key) for key in COLLIDING["integers"]()])
    (tmp_path / "case.json").write_text(json.dumps([{"what": "set", "bytes": manifest.seal(body).hex()}]))
    ends = children.run("metadata_of", directory=str(path), mutants=str(tmp_path / "case.json"), timeout=120)
    assert ends == ["CorruptCheckpointError"]


#: Those that collide however few they are.
OUTRIGHT = ["integers", "negative integers", "complex numbers", "tuples", "sets of tuples", "ranges"]


@pytest.mark.parametrize("kind", OUTRIGHT)
def test_what_no_load_would_take_is_not_saved(tmp_path, kind):
    keys = [*itertools.islice(COLLIDING[kind](), 600)]
    few = {"y": dict.fromkeys(keys[:256])}
    fastckpt.save(few, tmp_path / "few")
    assert fastckpt.load(tmp_path / "few") == few
    crowded = {
        "dict": {"y": dict.fromkeys(keys)},
        "odict": {"y": collections.OrderedDict.fromkeys(keys)},
        "ddict": {"y": collections.defaultdict(list, dict.fromkeys(keys))},
        "Counter": {"y": collections.Counter(dict.fromkeys(keys, 1))},
        "set": {"y": set(keys)},
        "frozenset": {"y": frozenset(keys)},
    }
    for what, state in crowded.items():
        with pytest.raises(fastckpt.UnsupportedTypeError, match=r"\['y'\].*collide"):
            fastckpt.save(state, tmp_path / what)
        assert not (tmp_path / what).exists()


FAMILIES = {
    "positions": range(100_000),
    "offsets": range(0, 1 << 40, 1 << 24),
    "large offsets": range(0, 1 << 58, 1 << 44),
    "powers of two": [1 << exponent for exponent in range(5000)],
    "powers of two, floats": [2.0**exponent for exponent in range(-1000, 1000)],
    "fractions": [number / 1024 for number in range(50_000)],
    "tiny fractions": [number / 2**52 for number in range(50_000)],
    "tenths": [number * 0.1 for number in range(50_000)],
    "pairs": [(row, column) for row in range(200) for column in range(200)],
    "sets": [frozenset((number, number + 1)) for number in range(20_000)],
    "days": [dt.date.fromordinal(number + 1) for number in range(20_000)],
    "lengths of time": [dt.timedelta(seconds=number) for number in range(20_000)],
    "names": [f"layers.{number}" for number in range(50_000)],
    "addresses": random.Random(7).sample(range(1 << 60), 50_000),
    "steps": [1000 * number for number in range(50_000)],
    "negative": range(-50_000, 50_000),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_as_people_have_them_are_taken(tmp_path, family):
    keys = list(FAMILIES[family])
    state = {"dict": dict.fromkeys(keys, 1), "set": set(keys), "frozen": frozenset(keys[::2])}
    fastckpt.save(state, tmp_path / "c")
    back = fastckpt.load(tmp_path / "c")
    assert list(back["dict"]) == keys
    assert back == state
