"""Converts torch tensors to their stored form, and back. No other file imports torch, and this one is imported late."""

from __future__ import annotations

import contextlib
import math
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastckpt.exceptions import UnsupportedTypeError

from . import cast_out as _cast_out
from . import device as _device
from . import memory as _memory
from . import pinned as _pinned
from .described import (
    THROUGH,
    Describe,
    Part,
    Parts,
    Stored,
    Unsupported,
    exact,
    expanded_sizes,
    expansion,
    integers,
    members,
    steps,
    text,
)
from .dtypes import PLAIN_NAMES, TORCH_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from .memory import Bytes, Mover
    from .pieces import Index

Tensor = torch.Tensor

#: Every dtype of the installed torch, by its name without ``torch.``
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix(TORCH_PREFIX): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_STORED_NAMES = {DTYPES[plain]: name for name, plain in PLAIN_NAMES.items() if plain in DTYPES}
_QUANTIZED = {name: DTYPES[name] for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if name in DTYPES}

#: By dtype: its name in the file, and the logical one if the file has ``U8``. Quantised tensors are stored in parts.
_STORED: dict[torch.dtype, tuple[str, str | None]] = {
    dtype: (_STORED_NAMES[dtype], None) if dtype in _STORED_NAMES else ("U8", str(dtype))
    for dtype in DTYPES.values()
    if dtype not in _QUANTIZED.values()
}

#: Elements are copied as integers: not every dtype has a copy kernel.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_QUANTIZED_RAW = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
#: Elements in a byte.
_PACKED = {"quint4x2": 2, "quint2x4": 4}

_COMPRESSED: dict[str, tuple[torch.layout, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "csr": (torch.sparse_csr, Tensor.crow_indices, Tensor.col_indices),
    "csc": (torch.sparse_csc, Tensor.ccol_indices, Tensor.row_indices),
    "bsr": (torch.sparse_bsr, Tensor.crow_indices, Tensor.col_indices),
    "bsc": (torch.sparse_bsc, Tensor.ccol_indices, Tensor.row_indices),
}

#: Up to this many elements, torch copies only in the calling thread, whatever its number of threads.
_SERIAL = 30 << 10

_strided = torch.strided
_new_stored = tuple.__new__
_HEAD = '["tensor",'
_TAILS = {"": "]", "g": ',"g"]', "p": ',"p"]', "pg": ',"pg"]'}


# In a state: values to tokens.


def _tensor(value: Tensor) -> Stored | Parts:
    return _describe(value, "g" if value.requires_grad else "")


def _parameter(value: Tensor) -> Stored | Parts:
    return _describe(value, "pg" if value.requires_grad else "p")


def _describe(value: Tensor, flags: str) -> Stored | Parts:
    dtype = value.dtype
    try:
        if (
            value.is_cpu
            and value.layout is _strided
            and dtype in _STORED
            and not value.is_nested
            and value.is_contiguous()
            and not value.is_conj()
            and not value.is_neg()
        ):
            name, logical = _STORED[dtype]
            shape = value.shape
            address = value.data_ptr()
            # A storage can be resized under its tensors: they lose memory that it no longer holds.
            if value.untyped_storage().nbytes() - value.nbytes < value.storage_offset() * value.itemsize:
                _no_address(value)
            # An empty tensor has no address, and is tied only to itself.
            tie = (address, dtype, shape) if address else _no_address(value)
            if logical is None:
                return _new_stored(Stored, (tie, name, shape, address, None, _HEAD, _TAILS[flags], None, None))
            stored = (value.nbytes,)
            return _new_stored(Stored, (tie, name, stored, address, (logical, shape), _HEAD, _TAILS[flags], None, None))
        return _describe_other(value, flags)
    except RuntimeError as error:
        # A tensor of a transform (torch.func), or of a backend without memory.
        raise Unsupported(f"its memory cannot be reached: {error}") from error


def _no_address(value: Tensor) -> int:
    if value.numel():
        raise Unsupported("its memory has been freed, as sharded modules do between steps: gather it first")
    return id(value)


def _is_whole(value: Tensor) -> bool:
    """Whether the storage of a strided tensor holds all of its elements: a storage can be resized below its tensors."""
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    end = value.storage_offset() + reach + 1
    return not value.numel() or bool(value.untyped_storage().nbytes() >= end * value.element_size())


def _describe_other(value: Tensor, flags: str) -> Stored | Parts:
    """Any tensor that is not contiguous in host memory."""
    if value.is_nested:
        return describe_nested(value)
    if value.is_meta:
        raise Unsupported("a meta tensor has no data: materialise it first, with to_empty() or by loading weights")
    layout = value.layout
    if value.is_quantized:
        if "p" in flags:
            raise Unsupported("a quantised Parameter cannot be stored: store its data")
        return _describe_quantized(value)
    if layout is torch.sparse_coo:
        whole = value.detach()
        token = f'["coo",{list(value.shape)},{"true" if value.is_coalesced() else "false"},"{flags}"]'.replace(" ", "")
        return Parts(token, ((Part("indices"), whole._indices()), (Part("values"), whole._values())))
    for name, (known, compressed, plain) in _COMPRESSED.items():
        if layout is known:
            whole = value.detach()
            token = f'["compressed","{name}",{list(value.shape)},"{flags}"]'.replace(" ", "")
            return Parts(
                token,
                (
                    (Part("compressed_indices"), compressed(whole)),
                    (Part("plain_indices"), plain(whole)),
                    (Part("values"), whole.values()),
                ),
            )
    if layout is not _strided or value.dtype not in _STORED:
        raise Unsupported(f"a tensor of layout {layout} and dtype {value.dtype} cannot be stored: store its to_dense()")
    return _describe_strided(value, flags)


def describe_nested(value: Tensor) -> Parts:
    """Return the token of a nested tensor, with its stored form."""
    return Parts('["type","torch.nested.nested_tensor"]', ((THROUGH, encode_nested(value)),))


def encode_nested(value: Tensor) -> dict[str, Any]:
    """The tensors in a nested tensor: separate tensors, or one tensor of which they are ranges along one dimension."""
    whole: Any = value.detach()
    if value.layout is _strided:
        parts: dict[str, Any] = {"constituents": list(whole.unbind()), "dtype": value.dtype}
    else:
        parts = {
            "values": whole._values,
            "offsets": whole._offsets,
            "lengths": whole._lengths,
            "jagged_dim": whole._ragged_idx,
        }
    return {**parts, "flags": "p" * isinstance(value, torch.nn.Parameter) + "g" * value.requires_grad}


def _describe_strided(value: Tensor, flags: str) -> Stored | Parts:
    strides, shape = value.stride(), value.shape
    if 0 in strides:
        expanded = expansion(shape, strides, flags)
        if expanded is not None:
            return Parts(expanded.token, ((THROUGH, value.detach()[expanded.base]),))
    name, logical = _STORED[value.dtype]
    address = value.data_ptr()
    if not _is_whole(value):
        _no_address(value)
    tie = (
        (address, value.dtype, shape, steps(shape, strides), value.is_conj(), value.is_neg(), value.device)
        if address
        else _no_address(value)
    )
    return Stored(
        tie,
        name,
        shape if logical is None else (value.nbytes,),
        0,
        None if logical is None else (logical, shape),
        _HEAD,
        _TAILS[flags] if value.is_cpu else f',"{flags}","{value.device}"]',
        mover_out(value) if address else None,
    )


def _describe_quantized(value: Tensor) -> Parts:
    name = str(value.dtype).removeprefix(TORCH_PREFIX)
    scheme = value.qscheme()
    pack = _PACKED.get(name)
    if pack is None:
        stored = torch.empty(0, dtype=_QUANTIZED_RAW[name], device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )
    else:
        packed = value if value.is_contiguous() and not value.storage_offset() else value.contiguous()
        stored = torch.empty(0, dtype=torch.uint8, device=value.device).set_(
            packed.untyped_storage(), 0, (-(-value.numel() // pack),), (1,)
        )
    one = scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    parts: tuple[Any, ...] = (
        (value.q_scale(), value.q_zero_point(), None)
        if one
        else (value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis())
    )
    token = f'["quantized","{name}",{list(value.shape)},"{"per_tensor" if one else "per_channel"}"]'.replace(" ", "")
    names = ("stored", "scale", "zero_point", "axis")
    return Parts(token, tuple(zip(map(Part, names), (stored, *parts), strict=True)))


def _size(value: torch.Size) -> str:
    sizes = []
    item: Any
    for item in value:
        # numpy's integers stay unchanged inside a torch.Size, and jagged tensors have sizes that are not numbers.
        if isinstance(item, torch.SymInt):
            raise Unsupported(f"a torch.Size with the symbolic size {item} has no value: store sizes that are numbers")
        if not -(2**63) <= int(item) < 2**63:
            raise Unsupported(f"a torch.Size with the size {item} cannot be stored: it is beyond 64 bits")
        sizes.append(str(int(item)))
    return f'["size",[{",".join(sizes)}]]'


_DESCRIBE: dict[type, Describe] = {
    Tensor: _tensor,
    torch.nn.Parameter: _parameter,
    torch.Size: _size,
    torch.dtype: lambda value: f'["dtype","{str(value).removeprefix(TORCH_PREFIX)}"]',
    torch.device: lambda value: f'["device","{value}"]',
}


def describe_of(kind: type) -> Describe | None:
    """The function that describes a type of torch, or None; raises Unsupported if a subclass cannot be decomposed."""
    found = _DESCRIBE.get(kind)
    if found is None and issubclass(kind, Tensor):
        reason = _why_not(kind)
        if reason is not None:
            raise Unsupported(reason)
        if (kind.__module__, kind.__name__) == ("torch.nested._internal.nested_tensor", "NestedTensor"):
            return describe_nested
    return found


def kind_of(value: Any) -> str | None:
    """``module``, ``optimizer`` or ``scheduler`` for an object of torch that is one; None for anything else."""
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "scheduler" if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else None


def own_tensors(module: torch.nn.Module) -> list[Tensor]:
    """The Parameters and buffers of a module: the tensors that can be filled in place."""
    return [*module.parameters(), *module.buffers()]


def random_states() -> dict[str, Any]:
    """The states of torch's generators: of the CPU, and of each device of a kind that is in use, by kind."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state()}
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        # A query would initialise the device.
        if module is not None and module.is_initialized():
            found[kind] = module.get_rng_state_all()
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators of the available devices."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
            continue
        module = getattr(torch, kind)
        for number in range(min(len(state), module.device_count())):
            module.set_rng_state(state[number], number)


#: torch's suffix for the keys of values that ``get_extra_state`` returns.
EXTRA_STATE = "_extra_state"


def extra_states(module: torch.nn.Module) -> set[str] | None:
    """The keys that ``get_extra_state`` adds to the state of a module; None if hooks may change the keys."""
    base = torch.nn.Module
    parts = dict(module.named_modules(remove_duplicate=False))
    if any(part._state_dict_hooks or type(part).state_dict is not base.state_dict for part in parts.values()):
        return None
    return {
        f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE
        for name, part in parts.items()
        if type(part).get_extra_state is not base.get_extra_state
    }


def reacts(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` does more for a module than copy tensors: hooks and overrides."""
    base = torch.nn.Module
    return type(module).load_state_dict is not base.load_state_dict or any(
        getattr(part, "_load_state_dict_pre_hooks", None)
        or getattr(part, "_load_state_dict_post_hooks", None)
        or type(part)._load_from_state_dict is not base._load_from_state_dict
        for part in module.modules()
    )


def safe_types() -> list[type]:
    """The classes that the program declared safe for ``torch.load``, except those that no save stores."""
    listed: list[Any] = getattr(torch.serialization, "get_safe_globals", list)()
    return [
        item
        for item in listed
        if isinstance(item, type) and not (issubclass(item, Tensor) and _why_not(item) is not None)
    ]


_SPREAD = (
    "is spread over processes: fastckpt.distributed.save, called by all of them, saves its shards, and "
    "fastckpt.distributed.load fills it; one process alone can save"
)
_TRACED = "is part of a trace or a transform and has no data of its own: save outside the trace or transform"
#: torch's own tensor subclasses that cannot be stored, by name, and why.
_REFUSED = {
    "DTensor": f"{_SPREAD} its full_tensor()",
    "ShardedTensor": f"{_SPREAD} what get_state_dict of torch.distributed.checkpoint.state_dict gives with "
    "StateDictOptions(full_state_dict=True, cpu_offload=True)",
    "AsyncCollectiveTensor": "may not have arrived yet: call its wait(), and store the result",
    "FakeTensor": "has no data",
    "FunctionalTensor": _TRACED,
    "ProxyTensor": _TRACED,
    "UninitializedParameter": "has no shape yet: run the module once, so that it is initialised",
    "UninitializedBuffer": "has no shape yet: run the module once, so that it is initialised",
}


def _why_not(kind: type[Tensor]) -> str | None:
    """Return why tensors of a subclass cannot be stored, or None if it has data or its own protocol."""
    for base in kind.__mro__:
        if base.__name__ in _REFUSED and base.__module__.startswith(TORCH_PREFIX):
            return f"a {base.__name__} {_REFUSED[base.__name__]}"
    if hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__"):
        return None
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return None
    return (
        f"tensor subclass {kind.__module__}.{kind.__qualname__} has no __tensor_flatten__ and __tensor_unflatten__: "
        f"leave it out, convert it with Registry(encode=), or register it with "
        f"fastckpt.register_type({kind.__name__}, encode, decode)"
    )


def without_class(value: Tensor) -> Tensor:
    """The data of a tensor of a subclass that holds its own data, as a plain tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor).requires_grad_(value.requires_grad)


def with_class(value: Any, cls: type[Tensor]) -> Tensor:
    """The inverse of :func:`without_class`: a tensor of the subclass again."""
    (tensor,) = _tensors([value])
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(cls).requires_grad_(tensor.requires_grad)


# Copies of bytes into and out of any tensor, in pieces.


class _Flip:
    """Changes signs in the bytes of a tensor: exact for every dtype and every nan.

    Args:
        size: bytes of an element.
        signs: which bytes of an element hold a sign bit to change, always the highest bit.
    """

    __slots__ = ("signs", "size")

    def __init__(self, size: int, signs: Sequence[int]) -> None:
        self.size = size
        self.signs = signs

    def __call__(self, data: Bytes, start: int = 0) -> None:
        """Change ``data``, the tensor's bytes from ``start`` on; elements may be cut."""
        for sign in self.signs:
            data[(sign - start) % self.size :: self.size] ^= 0x80


def _bare(value: Tensor) -> tuple[Tensor, _Flip | None]:
    """The bits in memory, and the conversion needed for a conj or neg view.

    The bits are integers of the dtype's size; on a device, if they are in order, a vector of bytes.
    """
    value = value.detach()
    dtype = value.dtype
    size = dtype.itemsize
    conjugate, negative = value.is_conj(), value.is_neg()
    if not conjugate and not negative and not value.is_cpu and value.is_contiguous():
        # The stride is given: torch calls a tensor of one element contiguous whatever its stride is.
        return value.as_strided((value.numel(),), (1,)).view(torch.uint8), None
    if negative:
        value = torch._neg_view(value)
    if conjugate:
        value = value.conj()
    raw = value.view(_RAW[size])
    if not conjugate and not negative:
        return raw, None
    # The sign is in the last byte: all machines and devices that torch supports are little-endian.
    if not dtype.is_complex:
        return raw, _Flip(size, [size - 1])
    return raw, _Flip(size, [size // 2 - 1] * negative + [size - 1] * (negative != conjugate))


def _sub(raw: Tensor, index: Index) -> Tensor:
    return raw[index] if index else raw


def _over(contiguous: Bytes, like: Tensor) -> Tensor:
    return torch.from_numpy(contiguous).view(like.dtype).view(like.shape)


def mover_out(value: Tensor) -> Mover:
    """Copies ranges of a strided tensor out, whatever its device and strides."""
    raw, flip = _bare(value)
    if not value.is_cpu:
        return _device.Download(torch, raw, flip)

    def copy(index: Index, contiguous: Bytes) -> None:
        # Use numpy: torch would use all of its own threads, whatever the caller's budget.
        part = _sub(raw, index).numpy()
        _memory.copy_strided(contiguous.view(part.dtype).reshape(part.shape), part)
        if flip is not None:
            flip(contiguous)

    return partial(_memory.copy_out, tuple(raw.shape), raw.element_size(), copy)


def recast(value: Tensor, name: str) -> _cast_out.Recast | None:
    """``value`` cast to the dtype of that name; None if this torch lacks it, RuntimeError if it cannot convert."""
    dtype = DTYPES.get(name)
    return None if dtype is None else _cast_out.recast_tensor(torch, value, dtype, *_STORED[dtype])


def mover_in(value: Tensor) -> Mover | None:
    """Copies ranges into a strided tensor on a device or with flipped signs; None if address and strides suffice."""
    raw, flip = _bare(value)
    inference = value.is_inference()
    if not value.is_cpu:
        return _device.Upload(torch, raw, flip, inference=inference)
    if flip is None:
        return None

    def copy(index: Index, contiguous: Bytes) -> None:
        contiguous = contiguous.copy()
        flip(contiguous)
        part = _sub(raw, index)
        with torch.inference_mode(inference):
            part.copy_(_over(contiguous, part))

    def back(index: Index, contiguous: Bytes) -> None:
        part = _sub(raw, index)
        _over(contiguous, part).copy_(part)
        flip(contiguous)

    return partial(_memory.copy_in, tuple(raw.shape), raw.element_size(), copy, back)


def pin(
    devices: Iterable[torch.device], address: int, nbytes: int, limit: int | None = None, piece: int | None = None
) -> _pinned.Registration | None:
    """Pin host memory for copies from and to ``devices``; see :func:`.pinned.register`.

    None if no device supports pinning.
    """
    for device in devices:
        found = _pinned.register(torch, device, address, nbytes, limit, piece or _pinned.PIECE)
        if found is not None:
            return found  # the registration is for all devices
    return None


def device_of(name: Any) -> torch.device | None:
    """The device of that name, or None for host memory; ValueError if it does not exist."""
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} is not a torch.device or its name: {error}") from error
    if found.type == "cpu":
        return None
    try:
        module = torch.get_device_module(found)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError):
        count = 0  # a kind without memory, or unknown to this build of torch
    if (found.index or 0) >= count:
        raise ValueError(f"there is no device {name} here")
    return found


def is_device(value: Any) -> bool:
    """Whether this is a ``torch.device``, which can be called."""
    return isinstance(value, torch.device)


@contextlib.contextmanager
def range_of(name: str) -> Iterator[None]:
    """See :func:`.ranges.range_of`."""
    nvtx = torch.cuda.nvtx if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    # An unrecorded range would cost more than everything else here; torch before 2.0 cannot report whether it records.
    seen = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    with torch.profiler.record_function(name) if seen else contextlib.nullcontext():
        if nvtx is not None:
            nvtx.range_push(name)
        try:
            yield
        finally:
            if nvtx is not None:
                nvtx.range_pop()


def before_steps(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` before each step of any optimizer, in the stepping thread; returns the inverse function."""
    # Dynamo would trace it into compiled steps, with guards on values that other threads change meanwhile.
    hook = torch._disable_dynamo(lambda *_: function())  # type: ignore[attr-defined]
    undo: Callable[[], None] = register_optimizer_step_pre_hook(hook).remove
    return undo


def changed(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the memory of ``tensors`` was written to."""
    bump = getattr(torch.autograd.graph, "increment_version", None)  # since torch 2.5
    if bump is not None:
        for tensor in tensors:
            if not tensor.is_inference():
                bump(tensor)


# Values from the tokens of a file.


def dtype_of(dtype: str, logical: str | None) -> torch.dtype | None:
    """The dtype of a stored tensor; None if this torch has none of that name."""
    if logical is None:
        return DTYPES.get(PLAIN_NAMES.get(dtype, ""))
    if not logical.startswith(TORCH_PREFIX):
        raise ValueError(f"{logical[:100]!r} is not a torch dtype")
    found = DTYPES.get(logical.removeprefix(TORCH_PREFIX))
    return found if found in _STORED else None


def empty_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor on ``device``."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of the shape of ``tensor``, on its device; spread over ranks in the same way."""
    return torch.empty_like(tensor.detach(), dtype=dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype, offset: int, nbytes: int) -> Tensor:
    """A new tensor in host memory for ``nbytes`` at ``offset`` of a file."""
    if nbytes < _memory.CONGRUENT:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return over(_memory.buffer(nbytes, offset, dtype.itemsize), dtype, shape)


def over(memory: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over ``memory``, which is not empty."""
    return torch.from_numpy(memory).view(dtype).view(shape)


def converter(source: torch.dtype, target: torch.dtype) -> Callable[[Bytes, Bytes], None]:
    """Converts elements of one dtype to another; RuntimeError if torch cannot."""
    torch.zeros(1, dtype=source).to(target)

    def convert(data: Bytes, out: Bytes) -> None:
        if _memory.address_of(data) % source.itemsize:
            data = data.copy()
        given, made = torch.from_numpy(data).view(source), torch.from_numpy(out).view(target)
        for start in range(0, len(made), _SERIAL):
            made[start : start + _SERIAL].copy_(given[start : start + _SERIAL])

    return convert


def from_array(array: np.ndarray[Any, Any]) -> Tensor | None:
    """A numpy array as a tensor over its memory, or a copy in native byte order; None if torch has no such dtype."""
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(array.astype(native, copy=False))
    except TypeError:
        return None


def with_flags(tensor: Tensor, flags: str) -> Tensor:
    """``tensor`` as a Parameter (``p``) or requiring a gradient (``g``), over the same memory."""
    if flags == "g":
        return tensor.detach().requires_grad_()
    if flags:
        return torch.nn.Parameter(tensor, requires_grad="g" in flags)
    return tensor


def size(token: list[Any]) -> torch.Size:
    """The decoder of a ``torch.Size``."""
    _, sizes = token
    return torch.Size(integers(sizes))


def dtype(token: list[Any]) -> torch.dtype:
    """The decoder of a ``torch.dtype``; LookupError if this torch has none of that name."""
    _, name = token
    return DTYPES[text(name)]


def device(token: list[Any]) -> torch.device:
    """The decoder of a ``torch.device``."""
    _, name = token
    return torch.device(text(name))


def _tensors(parts: Sequence[Any]) -> Sequence[Tensor]:
    if not all(type(part) is Tensor for part in parts):
        raise ValueError("a part that is not a tensor")
    return parts


def expanded(token: list[Any], parts: list[Any]) -> Tensor:
    """A tensor that repeats its base."""
    _, sizes, flags = token
    (base,) = _tensors(parts)
    return with_flags(base.expand(expanded_sizes(sizes, base.shape, base.element_size())), flags)


def coo(token: list[Any], parts: list[Any]) -> Tensor:
    """A sparse COO tensor of its indices and values."""
    _, sizes, coalesced, flags = token
    indices, values = _tensors(parts)
    if type(coalesced) is not bool:
        raise ValueError("not a boolean")
    return with_flags(
        torch.sparse_coo_tensor(
            indices, values, tuple(integers(sizes)), is_coalesced=coalesced, check_invariants=True, device=values.device
        ),
        flags,
    )


def compressed(token: list[Any], parts: list[Any]) -> Tensor:
    """A sparse tensor of one of the compressed layouts."""
    _, layout, sizes, flags = token
    rows, columns, values = _tensors(parts)
    return with_flags(
        torch.sparse_compressed_tensor(
            rows,
            columns,
            values,
            tuple(integers(sizes)),
            layout=_COMPRESSED[layout][0],
            check_invariants=True,
            device=values.device,
        ),
        flags,
    )


def quantized(token: list[Any], parts: list[Any]) -> Tensor:
    """A quantised tensor over the memory of its stored integers."""
    _, name, sizes, scheme = token
    stored, scale, zero, axis = parts
    kind = _QUANTIZED[name]
    shape = tuple(integers(sizes))
    if any(item < 0 for item in shape):
        raise ValueError("a negative size")
    pack = _PACKED.get(name)
    expected = shape if pack is None else (-(-math.prod(shape) // pack),)
    (stored,) = _tensors([stored])
    home = stored.device
    # The tensor is assembled in host memory, which supports every kind.
    stored = stored.cpu()
    if stored.dtype is not _QUANTIZED_RAW.get(name, torch.uint8) or tuple(stored.shape) != expected:
        raise ValueError("stored integers of the wrong dtype or shape")
    make: Callable[[Sequence[int]], Tensor]
    if scheme == "per_tensor":
        if type(scale) is not float or type(zero) is not int or axis is not None:
            raise ValueError("not a scale and a zero point")
        make = partial(torch._empty_affine_quantized, scale=scale, zero_point=zero, dtype=kind, device="cpu")
    else:
        _tensors([scale, zero])
        if scheme != "per_channel" or type(axis) is not int or not 0 <= axis < len(shape):
            raise ValueError("not scales and zero points")
        if tuple(scale.shape) != (shape[axis],) or tuple(zero.shape) != (shape[axis],):
            raise ValueError("scales or zero points of the wrong shape")
        make = partial(
            torch._empty_per_channel_affine_quantized,
            scales=scale.cpu(),
            zero_points=zero.cpu(),
            axis=axis,
            dtype=kind,
            device="cpu",
        )
    tensor = make(shape)
    if pack is None:
        tensor = tensor.set_(stored.untyped_storage(), stored.storage_offset(), shape, stored.stride())
    elif stored.numel():
        _memory.at(tensor.data_ptr(), stored.numel())[:] = stored.numpy()
    return tensor.to(home)


#: Values of these types that have a name.
_NAMED: dict[type, dict[str, Any]] = {
    kind: {str(value).removeprefix(TORCH_PREFIX): value for value in vars(torch).values() if type(value) is kind}
    for kind in (torch.layout, torch.memory_format)
}


def encode_named(value: Any) -> str:
    """The name of a ``torch.layout`` or ``torch.memory_format``."""
    return str(value).removeprefix(TORCH_PREFIX)


def decode_named(kind: type, name: Any) -> Any:
    """The inverse of :func:`encode_named`; UnsupportedTypeError if this torch has no value of that name."""
    found = _NAMED[kind].get(text(name))
    if found is None:
        raise UnsupportedTypeError(
            f"load: the checkpoint holds the {kind.__name__} torch.{name[:100]}, which this version of torch does not "
            'have: use a newer torch, choose other values with keys=, or load with framework="numpy"'
        )
    return found


def encode_generator(value: torch.Generator) -> dict[str, Any]:
    """The device and the state of a random generator."""
    return {"device": str(value.device), "state": value.get_state()}


def decode_generator(_: Any, value: Any) -> torch.Generator:
    """The random generator of that device in that state; UnsupportedTypeError if the device is missing."""
    device, state = members(value, "device", "state")
    (state,) = _tensors([state])
    state = state.cpu()
    if state.dtype is not torch.uint8 or state.dim() != 1:
        raise ValueError("not the state of a random generator")
    try:
        made = torch.Generator(text(device))
    except RuntimeError as error:
        raise UnsupportedTypeError(
            f"load: the checkpoint holds a random generator of the device {device[:100]!r}, which cannot be made here: "
            f'{str(error).splitlines()[0]}; choose other values with keys=, or load with framework="numpy", which '
            "gives its state"
        ) from error
    if made.device.type == "cpu":
        _check_twister(state)
    made.set_state(state)
    return made


def _check_twister(state: Tensor) -> None:
    """Refuse a state of the CPU's generator that would make torch read beyond its numbers: torch checks less."""
    # The seed, how many numbers are left, whether it was seeded, the index of the next one; then the numbers.
    _, left, _, following = struct.unpack_from("<QiiQ", state.numpy().tobytes())
    if left < 1 or left + following > _NUMBERS + 1:
        raise ValueError("a position outside the state of a random generator")


#: The state of the Mersenne twister.
_NUMBERS = 624


def decode_nested(_: Any, value: Any) -> Tensor:
    """The nested tensor made from its constituents, or from the tensors whose ranges they are."""
    if len(exact(value, dict)) == 3:  # noqa: PLR2004 - these
        constituents, dtype, flags = members(value, "constituents", "dtype", "flags")
        if type(dtype) is not torch.dtype:
            raise ValueError("not the dtype of a nested tensor")
        made = torch.nested.nested_tensor(list(_tensors(exact(constituents, list))), dtype=dtype)
    else:
        *parts, flags = members(value, "values", "offsets", "lengths", "jagged_dim", "flags")
        made = _jagged(*parts)
    if text(flags) not in _TAILS:
        raise ValueError("unknown flags of a nested tensor")
    return with_flags(made, flags)


def _jagged(values: Any, offsets: Any, lengths: Any, jagged_dim: Any) -> Tensor:
    _tensors([values, offsets] if lengths is None else [values, offsets, lengths])
    if type(jagged_dim) is not int or not 1 <= jagged_dim <= values.dim():
        raise ValueError("an invalid jagged dimension of a nested tensor")
    # torch's kernels do not check these.
    if any(part is not None and part.dtype not in (torch.int32, torch.int64) for part in (offsets, lengths)):
        raise ValueError("offsets or lengths of a nested tensor that are not integers")
    if offsets.dim() != 1 or not len(offsets) or (lengths is not None and lengths.shape != (len(offsets) - 1,)):
        raise ValueError("not the offsets of a nested tensor")
    starts, ends = offsets[:-1], offsets[1:] if lengths is None else offsets[:-1] + lengths
    if bool(((starts < 0) | (ends < starts) | (ends > values.shape[jagged_dim - 1])).any()):
        raise ValueError("offsets outside the values of a nested tensor")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=jagged_dim)
