"""The stager gathers tensors of a device on its own streams, and always waits for these."""

from __future__ import annotations

import gc

import pytest
import torch

import fastckpt
from fastckpt.dcp import Stager
from harness import needs, standin
from harness.internals import kept_memory
from harness.standin import faults

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

DEVICE = torch.device("standin", 0)


@pytest.fixture(autouse=True)
def clean():
    fastckpt.background.release_buffers()
    faults.reset(late=0.002)
    yield
    misuse = faults.misuse
    faults.reset()
    standin.forget_errors()
    fastckpt.background.release_buffers()
    assert misuse == []
    assert standin.cudart.bytes == 0


def test_what_is_on_a_device_is_staged_as_of_the_call():
    matrix = torch.arange(60_000.0).view(200, 300)
    wide = torch.randn(5000, dtype=torch.complex64)
    device = matrix.to(DEVICE)
    state = {
        "w": device,
        "tied": device,
        "t": device.t(),
        "some": device[::2, 3:-5],
        "conj": wide.to(DEVICE).conj(),
        "repeated": torch.tensor([2.0]).to(DEVICE).expand(7),
        "empty": torch.empty(0, 3, device=DEVICE),
        "scalar": torch.tensor(3.5).to(DEVICE),
        "host": matrix.clone(),
    }
    for turn in range(2):
        # The stager's copies run after earlier work of the stream.
        device.add_(turn)
        expected = matrix + turn
        events = faults.events
        staged = Stager().stage(state)
        assert faults.events - events <= 3, "the number of events does not depend on that of tensors"
        device.add_(100)
        assert {value.device.type for value in staged.values()} == {"cpu"}
        assert torch.equal(staged["w"], expected)
        assert staged["tied"] is staged["w"]
        assert torch.equal(staged["t"], expected.t())
        assert torch.equal(staged["some"], expected[::2, 3:-5])
        assert torch.equal(staged["conj"], wide.conj().resolve_conj())
        assert torch.equal(staged["repeated"], torch.full((7,), 2.0))
        assert staged["empty"].shape == (0, 3)
        assert float(staged["scalar"]) == 3.5
        assert torch.equal(staged["host"], matrix)
        device.add_(-100 - turn)
        del staged


def test_small_tensors_of_any_size_share_a_copy():
    wholes = [torch.arange(10_000, dtype=torch.float32), torch.randn(7000, dtype=torch.complex128)]
    kinds = [torch.float32, torch.int16, torch.complex128, torch.uint8]
    for number, kind in enumerate(kinds * 3):
        wholes.append(torch.arange(number + 1).to(kind))
    parts = [part for whole in wholes for part in whole.split(7)]
    state = {str(index): part.to(DEVICE) for index, part in enumerate(parts)} | {"host": torch.arange(5)}
    Stager().stage(state)
    before = faults.transfers
    staged = Stager().stage(state)
    assert faults.transfers - before <= 20
    assert all(torch.equal(staged[str(index)], part) for index, part in enumerate(parts))
    assert torch.equal(staged["host"], torch.arange(5))


def test_a_broken_device_fails_the_stage_and_its_memory_is_not_used_again():
    state = {"w": torch.ones(100_000, device=DEVICE), "v": torch.ones(100_000, device=DEVICE)}
    Stager().stage(state)
    assert len(kept_memory()) == 1
    faults.fail_at = faults.copies + 1
    with pytest.raises(RuntimeError, match="standin: unspecified launch failure"):
        Stager().stage(state)
    # The stream keeps the error, whose traceback references the staged tensors.
    standin.forget_errors()
    gc.collect()
    assert kept_memory() == []
    assert standin.cudart.bytes == 0
    assert bool((Stager().stage(state)["w"] == 1).all())
    assert len(kept_memory()) == 1
