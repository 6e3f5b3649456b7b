"""numpy's random generators as plain values, and back.

numpy trusts a state: if a position in it is out of range, numpy would read beyond the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .described import Unsupported, exact, members, text
from .numpy import from_tensor

#: The classes of ``numpy.random``, and the members of their states that are arrays: dtype and size.
BIT_GENERATORS: dict[str, dict[str, tuple[str, int]]] = {
    "MT19937": {"key": ("uint32", 624)},
    "PCG64": {},
    "PCG64DXSM": {},
    "Philox": {"counter": ("uint64", 4), "key": ("uint64", 2), "buffer": ("uint64", 4)},
    "SFC64": {"state": ("uint64", 4)},
}
#: The integers of the states: the greatest value of each, plus one.
_LIMITS = {
    "pos": 625,
    "state": 1 << 128,
    "inc": 1 << 128,
    "buffer_pos": 5,
    "has_uint32": 2,
    "uinteger": 1 << 32,
    "has_gauss": 2,
}
#: The most words of a seed sequence's pool and entropy: a new sequence mixes each word of its pool with all others.
_POOL, _WORDS = 256, 1 << 14


def encode_bit_generator(generator: Any) -> dict[str, Any]:
    """The state of a bit generator, and the seeds from which it spawns others."""
    return {**_encode_state(generator.state), "seed_sequence": _encode_seeds(generator)}


def _encode_state(state: Any) -> dict[str, Any]:
    if state["bit_generator"] not in BIT_GENERATORS:
        raise Unsupported(f"a random generator over {state['bit_generator']} cannot be stored: store its state")
    # A state shares no memory with its generator, except for Philox's buffer.
    return {name: np.array(part) if isinstance(part, np.ndarray) else part for name, part in state.items()}


def _encode_seeds(generator: Any) -> dict[str, Any] | None:
    # ``seed_seq`` is public since numpy 1.25.
    seeds = getattr(generator, "seed_seq", None) or generator._seed_seq  # noqa: SLF001
    if type(seeds) is not np.random.SeedSequence:
        return None
    state: Any = seeds.state
    entropy = state["entropy"]
    try:
        if entropy is not None:
            entropy = list(map(int, entropy)) if isinstance(entropy, (Sequence, np.ndarray)) else int(entropy)
        found = {**state, "entropy": entropy, "spawn_key": tuple(map(int, state["spawn_key"]))}
        _check_seeds(found)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"a random generator with this seed sequence cannot be stored: {error}") from error
    return found


def decode_bit_generator(name: str, value: Any) -> Any:
    """The bit generator of class ``name`` in this state; ValueError if the state is invalid."""
    state = _state(value)
    seeds = state.pop("seed_sequence")
    if state["bit_generator"] != name:
        raise ValueError("the state of another bit generator")
    return _restored(state, None if seeds is None else _seeds(seeds))


def encode_generator(generator: Any) -> dict[str, Any]:
    """A ``numpy.random.Generator`` as its bit generator."""
    return encode_bit_generator(generator.bit_generator)


def decode_generator(value: Any) -> Any:
    """The ``numpy.random.Generator`` over the bit generator of the state."""
    return np.random.Generator(decode_bit_generator(_state(value)["bit_generator"], value))


def encode_random_state(generator: Any) -> dict[str, Any]:
    """A ``numpy.random.RandomState``, which may hold a cached normal number."""
    return _encode_state(generator.get_state(legacy=False))


def decode_random_state(value: Any) -> Any:
    """The ``numpy.random.RandomState`` in this state."""
    state = _state(value)
    kept = {name: state.pop(name) for name in ("has_gauss", "gauss")}
    _check_integer("has_gauss", kept["has_gauss"])
    if type(kept["gauss"]) is not float:
        raise ValueError("a cached normal number that is not a float")
    made = np.random.RandomState(_restored(state, None))
    made.set_state({**made.get_state(legacy=False), **kept})
    return made


def _state(value: Any) -> dict[str, Any]:
    """A copy of a state whose names are plain strings, like its ``bit_generator``."""
    if any(type(name) is not str for name in exact(value, dict)):
        raise ValueError("not the state of a random generator")
    text(value["bit_generator"])
    return dict(value)


def _restored(state: dict[str, Any], seeds: Any) -> Any:
    arrays = BIT_GENERATORS[state["bit_generator"]]
    made: Any = getattr(np.random, state["bit_generator"])(0 if seeds is None else seeds)
    if not _alike(state, made.state):
        raise ValueError("not the members of the state of a bit generator")
    checked = {name: _checked(name, part, arrays) for name, part in state.items() if name != "bit_generator"}
    made.state = {"bit_generator": state["bit_generator"], **checked}
    return made


def _alike(value: Any, model: Any) -> bool:
    """Whether two states have the same members."""
    if type(model) is not dict:
        return type(value) is not dict
    if type(value) is not dict or any(type(key) is not str for key in value):
        return False
    return value.keys() == model.keys() and all(_alike(value[key], model[key]) for key in model)


def _checked(name: str, part: Any, arrays: dict[str, tuple[str, int]]) -> Any:
    if type(part) is dict:
        return {each: _checked(each, value, arrays) for each, value in part.items()}
    if name not in arrays:
        _check_integer(name, part)
        return part
    dtype, size = arrays[name]
    part = from_tensor(part)
    if part.dtype != np.dtype(dtype) or part.shape != (size,):
        raise ValueError(f"not the {name} of a bit generator")
    return part


def _check_integer(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < _LIMITS[name]:
        raise ValueError(f"not the {name} of a random generator")


def _seeds(value: Any) -> np.random.SeedSequence:
    _check_seeds(value)
    return np.random.SeedSequence(**value)


def _check_seeds(value: Any) -> None:
    entropy, spawn_key, pool_size, spawned = members(value, "entropy", "spawn_key", "pool_size", "n_children_spawned")
    words = entropy if type(entropy) is list else [] if entropy is None else [entropy]
    numbers = [*words, *exact(spawn_key, tuple), pool_size, spawned]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("numbers that are not integers of at least 0")
    if sum(number.bit_length() // 32 + 1 for number in numbers) > _WORDS or pool_size > _POOL:
        raise ValueError(f"more than {_WORDS} words of entropy, or a pool of more than {_POOL}")
    if spawned >= 1 << 32:
        raise ValueError("2**32 or more spawned children")
