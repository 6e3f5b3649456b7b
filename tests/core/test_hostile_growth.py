"""Small checkpoints with high costs: a reader's work and memory grow no faster than the file.

Each checkpoint is forged behind a correct checksum, and so large that the growth it provokes would show beyond
doubt: minutes, or gigabytes.
"""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import json
import os
import random
import string
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import cli, limits, manifest, programs, zygote
from harness.draws import some

#: The limit of CPU time, which a busy machine does not change; each case once took several times as long, or minutes.
SECONDS = 10.0
GROWTH = 192 << 20


@pytest.fixture
def children(children_with_torch):
    return children_with_torch


@pytest.fixture
def forged(tmp_path):
    """The path of a checkpoint with one array, and its manifest's body to forge."""
    path = tmp_path / "step"
    return path, manifest.minimal(path, [("a", "U8", [4], b"data")])


def ended(children, path, operation="load", *, job="load_timed", bound=GROWTH, **options):
    """Run an operation on ``path`` in a separate process, check its time and memory, and return its end."""
    end = children.run(job, path=str(path), operation=operation, timeout=120, **options)
    assert not isinstance(end, zygote.Raised), end
    assert end["processor"] < SECONDS, end
    assert end["grown"] < bound, end
    return end


# --- keys whose hashes collide ---------------------------------------------------------------------------------------

PERIOD = (1 << 61) - 1
MANY = 60_000


def _integer(value):
    return [value if abs(value) < 1 << 53 else ["int", f"{value:#x}"]]


def _float(value):
    return [["float", struct.pack(">d", value).hex()]]


def _walkers(bits):
    """Integers below 2^61 with different hashes that take Python many steps to insert into a dict.

    The first keys take places that follow each other in the order of steps after all bits of a hash are used up.
    The other keys are made so that every earlier step leads to one of these places.
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
    """The tokens of a key."""
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


@pytest.mark.parametrize("kind", some(COLLIDING))
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


#: Keys that always collide, even if there are few.
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
        with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"\['y'\].*collide"):
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


@pytest.mark.parametrize("family", some(FAMILIES))
def test_keys_as_people_have_them_are_taken(tmp_path, family):
    keys = list(FAMILIES[family])
    state = {"dict": dict.fromkeys(keys, 1), "set": set(keys), "frozen": frozenset(keys[::2])}
    fastckpt.save(state, tmp_path / "c")
    back = fastckpt.load(tmp_path / "c")
    assert list(back["dict"]) == keys
    assert back == state


# --- ties, tokens, and other contents that take more than their file -------------------------------------------------


def tied(depth, width=1):
    """The tokens of a structure with a tensor ``width`` times at each of ``depth`` levels."""
    tokens = []
    for _ in range(depth):
        tokens += [["dict", width + 1]]
        tokens += [token for place in range(width) for token in (f"k{place}", ["array", 0])]
        tokens += ["d"]
    return [*tokens, None]


@pytest.mark.parametrize("operation", ["load", "open", "keys", "into", "info", "ls"])
def test_a_tie_at_each_of_many_levels(children, forged, operation):
    path, body = forged
    body["structure"] = tied(9000)
    manifest.forge(path, body)
    if operation in ("info", "ls"):
        end = ended(children, path, operation, job="command_timed")
        assert end["status"] == 0, end
        return
    options = {"keys": {"keys": "*k0"}, "into": {"into": {}}}.get(operation, {})
    end = ended(children, path, operation if operation == "open" else "load", **options)
    assert end["kind"] == ("StructureMismatchError" if operation == "into" else "loaded"), end


def test_names_of_ties_end_with_the_room_for_them(forged, monkeypatch):
    """Tied places beyond the limit of names follow the first place: no tie is lost, and no name is wrong."""
    path, body = forged
    limits.lower(monkeypatch, "characters of names", 0)
    limits.lower(monkeypatch, "characters of names for each token", 1)
    body["structure"] = [["dict", 40], *(token for number in range(40) for token in (f"key-{number}", ["array", 0]))]
    manifest.forge(path, body)
    with fastckpt.open(path) as checkpoint:
        named = [number for number in range(40) if f"key-{number}" in checkpoint]
    assert 0 < len(named) < 40
    assert named == list(range(len(named)))
    assert len(fastckpt.load(path, keys="a")) == 40 - len(named)
    assert len(fastckpt.load(path, keys=["a", "key-*"])) == 40


def test_deep_ties_are_filled_in_place(forged):
    """A load fills a state as deep as its checkpoint, and refuses one that lacks the deepest tensor."""
    path, body = forged
    body["structure"] = tied(3000)
    manifest.forge(path, body)
    state = fastckpt.load(path)
    state["k0"][:] = 0
    assert bytes(fastckpt.load(path, into=state)["d"]["d"]["k0"]) == b"data"
    inner = state
    for _ in range(2999):
        inner = inner["d"]
    del inner["k0"]
    with pytest.raises(fastckpt.StructureMismatchError, match="missing from into=") as raised:
        fastckpt.load(path, into=state)
    (difference,) = raised.value.differences
    assert difference.startswith("['d']['d']")
    assert difference.endswith("['d']['d']['k0']: missing from into=")
    assert len(difference) < 500


EMPTY = {
    "sets": [["set", 0]],
    "frozen sets": [["fset", 0]],
    "sets of one": [["set", 1], 0],
    "dicts": [["dict", 0]],
    "dicts of one": [["dict", 1], 0, 0],
    "ordered dicts": [["odict", 0]],
    "ordered dicts of one": [["odict", 1], 0, 0],
    "default dicts": [["ddict", 0], None],
    "ties": [["array", 0]],
    "lists": [["list", 0]],
    "tuples of one": [["tuple", 1], 0],
    "slices": [["slice"], 0, 0, 0],
    "integers": [["int", "0xfffffffffffffff"]],
    "short bytes": [["bytes", ""]],
    "sizes": [["size", []]],
    "numbers in one token": None,
}
#: Bytes of memory that a byte of the manifest may take (docs/format.md, section 3.4).
FACTOR = 64


@pytest.mark.parametrize("kind", some(EMPTY))
def test_what_a_reader_takes_is_bounded_by_the_file(children, forged, kind):
    path, body = forged
    if EMPTY[kind] is None:
        body["structure"] = [["size", [7] * 1_000_000]]
    else:
        many = 100_000
        body["structure"] = [["list", many], *EMPTY[kind] * many]
    manifest.forge(path, body)
    size = (path / manifest.NAME).stat().st_size
    for operation in ("load", "open"):
        end = ended(children, path, operation, bound=FACTOR * size)
        assert end["kind"] == "loaded", end


def _options(body, _):
    body["saved"]["options"] = [["", ""]] * 1_000_000


def _tensors(body, tensor):
    body["tensors"] += [{**tensor, "name": f"n{number}", "shape": [0], "crc": ""} for number in range(100_000)]


def _unknown(body, tensor):
    body["unknown"] = tensor["unknown"] = [[]] * 1_000_000


#: Members other than the structure, which tests above change.
MEMBERS = {
    "options": (_options, "CorruptCheckpointError"),
    "tensors": (_tensors, "loaded"),
    "unknown": (_unknown, "loaded"),
}


#: Bytes of memory for each byte of these, in the core's reader, and in the portable one, whose empty lists take 56.
OTHERS = 32 if os.environ.get("FASTCKPT_TEST_PORTABLE") else 12


@pytest.mark.parametrize("member", MEMBERS)
def test_no_other_member_takes_much_more_than_the_file(children, forged, member):
    path, body = forged
    grow, kind = MEMBERS[member]
    grow(body, body["tensors"][0])
    manifest.forge(path, body)
    size = (path / manifest.NAME).stat().st_size
    end = ended(children, path, bound=OTHERS * size)
    assert end["kind"] == kind, end


#: The placeholder for one long text in a body, and a character that makes a text much longer when it is quoted.
LONG, DELETE = "?" * 40, "\x7f"


def _entries(count, **more):
    """Tensors with the shortest possible names."""
    names = itertools.product(string.ascii_letters + string.digits, repeat=4)
    return lambda body, tensor: body["tensors"].extend(
        {**tensor, "name": "".join(name), "shape": [0], "crc": "", **more} for name in itertools.islice(names, count)
    )


def _shards(body, _):
    body["shards"] += [{**body["shards"][0], "file": f"{number}.safetensors"} for number in range(99_999)]


#: The change of the body, the text for :data:`LONG` in it, and whether the result is a valid manifest.
TWICE = {
    "smallest entries": (_entries(500_000), "", True),
    "dimensions": (_entries(200_000, shape=[0] * 64), "", True),
    "other types": (_entries(400_000, **{"as": {"dtype": "x", "shape": [0]}}), "", True),
    "second checksums": (_entries(400_000, crc64xz="0" * 16), "", True),
    "shards": (_shards, "", False),
    "a structure": (lambda body, _: body.update(structure=[LONG]), "n" * 100_000_000, True),
    "a name": (lambda _, tensor: tensor.update(name=LONG), r"\n" + "n" * 100_000_000, True),
    "a prefix": (lambda body, _: body["shards"][0].update(prefix=LONG), r"\n" + "n" * 100_000_000, False),
    "an option": (lambda body, _: body["saved"].update(options=[["", LONG]]), r"\n" + "n" * 100_000_000, True),
    "checksums": (lambda _, tensor: tensor.update(crc=LONG), r"\u0030" + "0" * 100_000_000, False),
    "a dtype": (lambda _, tensor: tensor.update(dtype=LONG), "n" * 100_000_000, False),
    "a name that is taken": (_entries(2, name=LONG), "n" * 50_000_000, False),
    "a text for a number": (lambda _, tensor: tensor.update(offset=LONG), DELETE * 20_000_000, False),
    "a text for a tensor": (lambda body, _: body["tensors"].append(LONG), DELETE * 20_000_000, False),
    "a text for an object": (lambda body, _: body.update(saved=LONG), DELETE * 20_000_000, False),
    "a file": (lambda body, _: body["shards"][0].update(file=LONG), "/" + DELETE * 20_000_000, False),
}


@pytest.mark.parametrize("kind", some(TWICE))
def test_the_core_takes_no_more_than_twice_the_file(children, forged, kind):
    path, body = forged
    spoil, long, sound = TWICE[kind]
    spoil(body, body["tensors"][0])
    text = manifest.seal(body).partition(b"\n")[2]
    manifest.forge(path, text.replace(LONG.encode(), long.encode()))
    size = (path / manifest.NAME).stat().st_size
    end = ended(children, path, "reader", bound=2 * size + 64_000_000)
    assert end["kind"] == ("loaded" if sound else "CorruptCheckpointError"), end["text"][:1000]
    assert len(end["text"]) < 10_000


def test_a_token_of_many_lists_is_refused_before_it_is_parsed(children, forged):
    path, body = forged
    body["structure"] = [["size", *([[]] * 3_000_000)]]
    manifest.forge(path, body)
    # A reader holds the text once, and a few MiB of arrays; the lists would take 168 MB.
    size = (path / manifest.NAME).stat().st_size
    end = ended(children, path, "load", bound=5 * size)
    assert end["kind"] == "CorruptCheckpointError", end
    assert "more than one list" in end["text"], end


def test_verify_of_many_missing_shards(children, tmp_path):
    """The steps grow in proportion to the shards, so that 40,000 shards with 40,000 tensors do not take minutes."""
    path, many = tmp_path / "step", 40_000
    body = manifest.minimal(path, [("a", "U8", [4], b"data")])
    (shard,), (tensor,) = body["shards"], body["tensors"]
    names = [f"{number}.safetensors" for number in range(many)]
    body["shards"] = [{**shard, "file": name} for name in names]
    body["tensors"] = [{**tensor, "name": name, "shard": number} for number, name in enumerate(names)]
    body["structure"] = [None]
    manifest.forge(path, body)
    end = ended(children, path, "verify")
    assert end["ok"] is False, end


# --- text of a file on a terminal -------------------------------------------------------------------------------------

#: A colour, a title, a carriage return, a C1 code, a reversed direction, a line feed and other control characters.
NASTY = "a\x1b[31mb\x1b]0;title\x07\rc\x9b2Jd\u202ee\u2066\n\x7f\u200ff"


def forge_escaped(path, body):
    """Write a manifest in ASCII, because a lone surrogate has no UTF-8 form."""
    manifest.forge(path, json.dumps(body).encode()[1:] + b"\n")


def harmless(text):
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.fixture
def nasty(tmp_path):
    path = tmp_path / "step"
    state = {NASTY: np.zeros(3), "tie": {NASTY + "2": np.ones(2)}}
    fastckpt.save(state, path, metadata={NASTY: NASTY, "lone": "\udc80", "\ud800": ["\udfff"]})
    body = manifest.body_of(path)
    body["writer"] = {"name": NASTY, "version": NASTY}
    body["saved"].update(engine=NASTY, fallback=NASTY)
    forge_escaped(path, body)
    return path, body


@pytest.fixture
def told(children):
    """Run the command; return its exit status and its output."""

    def run(*arguments):
        done = programs.run(children, [Path(fastckpt.__file__).with_name("__main__.py"), *arguments])
        assert harmless(done.stdout), done
        assert harmless(done.stderr), done
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("command", ["info", "ls", "verify", "export"])
@pytest.mark.parametrize("as_json", [False, True])
def test_text_of_a_file_does_not_reach_the_terminal_raw(nasty, told, command, as_json, tmp_path):
    path, _ = nasty
    more = [tmp_path / "out.safetensors"] if command == "export" else []
    status, text = told(command, path, *more, *(["--json"] if as_json else []))
    assert status == 0, text
    if command in ("info", "ls") and not as_json:
        assert "\\x1b[31m" in text
        assert "\\u202e" in text
    if command == "info":
        assert "\\udc80" in text


def test_damage_and_errors_show_no_text_raw(nasty, told, tmp_path):
    path, body = nasty

    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    status, text = told("verify", path)
    assert status == 1
    assert "\\x1b[31m" in text
    with pytest.raises(fastckpt.CorruptCheckpointError) as raised:
        fastckpt.load(path)
    assert harmless(str(raised.value))
    # An error of the core contains the name.
    body["tensors"][0]["offset"] = 1 << 40
    forge_escaped(path, body)
    status, text = told("info", path)
    assert status == 1
    assert "1b" in text
    with pytest.raises(fastckpt.CorruptCheckpointError) as raised:
        fastckpt.open(path)
    assert harmless(str(raised.value))
    assert told("ls", tmp_path / NASTY)[0] == 2
    assert told("import", tmp_path / NASTY, tmp_path / "out")[0] == 2


def test_a_locale_without_the_characters_is_no_traceback(nasty):
    path, _ = nasty
    fastckpt.save({"größe": np.zeros(1)}, path, overwrite=True)
    command = [sys.executable, "-m", "fastckpt", "ls", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe" in done.stdout


def test_one_long_name_does_not_widen_all_rows(capsys, tmp_path):
    state = {f"t{number}": np.zeros(1) for number in range(200)}
    fastckpt.save({**state, "n" * 50_000: np.zeros(1)}, tmp_path / "c")
    assert cli.main(["ls", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert "n" * 50_000 in out
    assert len(out) < 50_000 + 202 * 200
