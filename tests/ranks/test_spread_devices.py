"""DTensors and small plain tensors on a device, whatever the number of the rank's device."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness import needs, standin
from harness.internals import local_of


def _described() -> tuple[list[str], list[int], list[bytes]]:
    values = torch.arange(6.0).reshape(3, 2)
    there = values.to(torch.device("standin", 0))
    spread = distribute_tensor(values, init_device_mesh("cpu", (1,)), [Shard(0)])
    spread._local_tensor = there
    local = local_of({"d": spread, "p": there.clone(), "q": torch.ones(1)}, 0, [0])
    out = []
    for index, tensor in enumerate(local.request.flat.tensors[:2]):
        data = np.zeros(tensor.capacity, np.uint8)
        local.request.flat.movers[index](0, data.ctypes.data, data.nbytes)
        out.append(data.tobytes())
    return local.request.flat.tokens[1:], [tensor.address for tensor in local.request.flat.tensors[:2]], out


def test_tensors_on_a_device(forge):
    if not standin.AVAILABLE:
        needs.missing("needs torch 2.10 (a back end that is set up from Python)")
    with forge.group(1) as group:
        (found,) = group.run(_described)
    tokens, addresses, data = found
    assert tokens == ['"d"', '["tensor",0,"","standin"]', '"p"', '["tensor",1,"","standin"]', '"q"', '["tensor",2]']
    assert addresses == [0, 0]
    assert data == [np.arange(6, dtype=np.float32).tobytes()] * 2
