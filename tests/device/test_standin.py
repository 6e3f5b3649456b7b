"""The stand-in itself: it works late but in order, and detects misuse on which a real device would fail."""

from __future__ import annotations

import gc

import torch

from harness import standin
from harness.devices import DEVICE, OTHER, OnDevice, raises, there
from harness.standin import cudart, faults


class TestStandin(OnDevice):
    on = "standin"

    def test_it_is_late_and_in_order(self):
        source = torch.arange(1000.0)
        target = torch.empty(1000, device=DEVICE)
        assert (target.device, target.is_cpu, target.data_ptr() != 0) == (DEVICE, False, True)
        stale = torch.zeros(1000)
        with faults.held() as go, torch.standin.stream(standin.Stream(DEVICE)) as _:
            target.copy_(source, non_blocking=True)
            stale.copy_(target, non_blocking=True)
            assert (stale == 0).all()
            assert (there(target) != source).any()
            go()
            standin.current_stream().synchronize()
        assert (stale == source).all()

    def test_what_is_freed_is_overwritten_unless_a_stream_was_recorded(self):
        side = standin.Stream(DEVICE)
        for is_protected in (True, False):
            source, target = torch.ones(1000, device=DEVICE), torch.zeros(1000)
            torch.standin.synchronize(DEVICE)
            gc.collect()
            before = standin.live()
            with faults.held() as go:
                with torch.standin.stream(side):
                    target.copy_(source, non_blocking=True)
                if is_protected:
                    source.record_stream(side)
                view = source[3:]
                del source
                gc.collect()
                assert standin.live() == before
                del view
                assert standin.live() == before - 4000
                if not is_protected:
                    standin.default_stream(DEVICE).synchronize()
                go()
            side.synchronize()
            assert bool((target == 1).all()) == is_protected

    def test_streams_belong_to_devices_and_threads(self):
        side = standin.Stream(OTHER)
        with torch.standin.stream(side):
            assert standin.current_stream(OTHER) is side
            assert standin.current_stream() is side
            assert standin.current_stream(DEVICE) is standin.default_stream(DEVICE)
        assert standin.current_stream(OTHER) is standin.default_stream(OTHER)
        event = standin.Event()
        event.record(side)
        with raises(RuntimeError, "of one device was recorded on a stream of another"):
            event.record(standin.default_stream(DEVICE))
        across = torch.arange(5.0).to(DEVICE).to(OTHER)
        assert across.device == OTHER
        assert (across + 1).cpu().tolist() == [1, 2, 3, 4, 5]

    def test_kernels_run_in_streams(self):
        weight = torch.nn.Parameter(torch.ones(100, device=DEVICE))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.grad = torch.ones_like(weight)
        whole = torch.zeros(100, device=DEVICE)
        torch.standin.synchronize(DEVICE)
        with faults.held() as go, torch.standin.stream(standin.Stream(DEVICE)):
            version = weight._version
            optimizer.step()
            joined = torch.cat([weight.detach(), whole])
            torch._foreach_copy_([whole], [weight.detach()])
            assert weight._version > version
            assert (there(weight) == 1).all()
            go()
            standin.current_stream().synchronize()
        assert (there(weight) == 0.5).all()
        assert (there(whole) == 0.5).all()
        assert there(joined).tolist() == [0.5] * 100 + [0.0] * 100

    def test_registered_memory_is_watched(self):
        with torch.standin.device(DEVICE):
            memory = torch.zeros(4096 * 4, dtype=torch.uint8)
            first = -(-memory.data_ptr() // 4096) * 4096
            skip = first - memory.data_ptr()
            assert [cudart.cudaHostRegister(first + at, 4096, 1) for at in (0, 4096, 4096)] == [0, 0, 712]
            with raises(RuntimeError, "CUDA error 712, left behind"):
                torch.zeros(3, device=DEVICE)
            source = torch.ones(8192, dtype=torch.uint8, device=DEVICE)
            with raises(RuntimeError, "across the edge of registered memory"):
                memory[skip : skip + 8192].copy_(source)
            memory[skip : skip + 4096].copy_(source[:4096])
            with faults.held() as go, torch.standin.stream(standin.Stream(DEVICE)):
                memory[skip : skip + 4096].copy_(source[:4096], non_blocking=True)
                assert [cudart.cudaHostUnregister(first + at) for at in (0, 4096, 4096)] == [0, 0, 713]
                go()
                standin.current_stream().synchronize()
            assert faults.misuse == ["host memory was unregistered before its copy had ended"]
            faults.misuse.clear()
            cudart.last.error = 0

    def test_a_capture_forbids_to_wait(self):
        torch.zeros(3, device=DEVICE)
        with standin.capturing():
            assert torch.standin.is_current_stream_capturing()
            with raises(RuntimeError, "not permitted when stream is capturing"):
                torch.standin.synchronize(DEVICE)
        assert not torch.standin.is_current_stream_capturing()
