"""Snapshots of parts: what ranks copy before the layout of their files is agreed."""

import ctypes

import numpy as np
import pytest

from fastckpt import _core
from fastckpt._tensors.described import Tensor

OPTIONS = _core.SaveOptions(shard_size=1_000_000, threads=2)


def part(array, *, is_here=True):
    return Tensor("", "U8", (array.nbytes,), array.ctypes.data if is_here else 0, array.nbytes, None)


def test_parts_are_copied_to_their_places():
    arrays = [np.arange(size, dtype=np.uint8) for size in (5, 3, 70_000, 0, 3 << 20)]
    asked = []

    def fill(ranges):
        for index, start, address, nbytes in ranges:
            asked.append(index)
            ctypes.memmove(address, arrays[index].ctypes.data + start, nbytes)

    parts = [part(array, is_here=index != 1) for index, array in enumerate(arrays)]
    snapshot = _core.Snapshot.of_parts(parts, bytes([0, 1, 1, 0, 0]), fill)
    memory = _core.Memory(snapshot.nbytes)
    snapshot.attach(memory)
    places = snapshot.places()
    # The second and the third lie together, as copies of one device do.
    assert [address - memory.address for address, _ in places] == [0, 64, 67, 70_080, 70_080]
    assert [nbytes for _, nbytes in places] == [array.nbytes for array in arrays]
    snapshot.stage(bytes([1, 1, 0, 1, 1]), last=False, options=OPTIONS)
    ctypes.memmove(places[2][0], arrays[2].ctypes.data, arrays[2].nbytes)
    with pytest.raises(ValueError, match="more bytes"):
        snapshot.copied(70_001)
    snapshot.copied(70_000)
    snapshot.stage(bytes(5), last=True, options=OPTIONS)
    assert snapshot.staged == snapshot.total == sum(array.nbytes for array in arrays)
    assert asked == [1]
    for (address, nbytes), array in zip(places, arrays, strict=True):
        assert ctypes.string_at(address, nbytes) == array.tobytes()
    snapshot.close()
    memory.close()


def test_parts_are_no_files(tmp_path):
    array = np.ones(3, dtype=np.uint8)
    with pytest.raises(ValueError, match="one byte for each part"):
        _core.Snapshot.of_parts([part(array)], b"", None)
    with pytest.raises(ValueError, match="needs a callback"):
        _core.Snapshot.of_parts([part(array, is_here=False)], b"\0", None)
    snapshot = _core.Snapshot.of_parts([part(array)], b"\0", None)
    snapshot.attach(_core.Memory(snapshot.nbytes))
    with pytest.raises(RuntimeError, match="not whole"):
        snapshot.stage(b"\0", last=True, options=OPTIONS)
    snapshot = _core.Snapshot.of_parts([part(array)], b"\0", None)
    snapshot.attach(_core.Memory(snapshot.nbytes))
    snapshot.stage(b"\1", last=True, options=OPTIONS)
    with pytest.raises(RuntimeError, match="of parts, not of files"):
        snapshot.save(str(tmp_path / "c"), OPTIONS, None)
