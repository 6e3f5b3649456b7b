"""Features that need CUDA: graphs, pinned memory, the allocator, sharded modules, and time. Not on the stand-in."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import fastckpt
from fastckpt import distributed
from harness import devices
from harness.devices import DEVICE, OnDevice, each, raises, there
from harness.internals import kept_memory

MIB = 1 << 20
GIB = 1 << 30
TESTS = Path(__file__).resolve().parents[1]


@contextmanager
def host_waits():
    """Record the waits of this thread for events, streams and devices, by name."""
    found, me = [], threading.get_ident()

    def watched(owner, name):
        usual = getattr(owner, name)

        def wait(*arguments, **named):
            if threading.get_ident() == me:
                found.append(f"{getattr(owner, '__name__', owner)}.{name}")
            return usual(*arguments, **named)

        return mock.patch.object(owner, name, wait)

    with ExitStack() as stack:
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            stack.enter_context(watched(owner, "synchronize"))
        yield found


def parameters_of(nbytes, count=8):
    """Return parameters of so many bytes, with gradients, and an optimizer whose steps subtract 1 from them."""
    parameters = [torch.nn.Parameter(torch.full((nbytes // count // 4,), 5.0, device=DEVICE)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def state_of(parameters):
    return {str(index): parameter.detach() for index, parameter in enumerate(parameters)}


class TestGraphs(OnDevice):
    on = "cuda"

    def test_nothing_begins_while_a_graph_is_captured(self):
        value = torch.zeros(1_000_000, device=DEVICE)
        fastckpt.save({"w": value}, self.path / "there")
        torch.cuda.synchronize()
        calls = (
            lambda: fastckpt.save({"w": value}, self.path / "c"),
            lambda: fastckpt.save_async({"w": value}, self.path / "c"),
            lambda: fastckpt.save_async({"w": value}, self.path / "c", io=fastckpt.IO(lazy=True)),
            lambda: fastckpt.load(self.path / "there", device=DEVICE),
            lambda: fastckpt.load(self.path / "there", into={"w": value}),
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value.add_(1)
            for call in calls:
                with raises(RuntimeError, "captured into a graph"):
                    call()
        assert not (self.path / "c").exists()
        # The captured graph is complete.
        graph.replay()
        graph.replay()
        assert (value == 2).all()
        fastckpt.save({"w": value}, self.path / "c")
        assert (fastckpt.load(self.path / "c")["w"] == 2).all()

    def test_a_save_finds_what_a_replay_has_computed(self):
        value = torch.zeros(5_000_000, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                value.add_(1)
            made = value * 2
        for turn in range(1, 4):
            graph.replay()
            pending = fastckpt.save_async({"w": value, "made": made}, self.path / "c", io=fastckpt.IO(lazy=True))
            # No hook runs in a replay, so the program must wait for the staging.
            pending.wait_staged()
            graph.replay()
            pending.result(60)
            loaded = fastckpt.load(self.path / "c")
            assert (loaded["w"] == 20 * (2 * turn - 1)).all()
            assert (loaded["made"] == 40 * (2 * turn - 1)).all()


class TestPinnedMemory(OnDevice):
    on = "cuda"

    def test_memory_is_pinned_as_torch_sees_it(self):
        state = {"w": torch.arange(16 * MIB, device=DEVICE)}
        for name, call in {
            "snapshot": lambda: fastckpt.save_async(state, self.path / "c").result(60),
            "staging of a save": lambda: fastckpt.save(state, self.path / "c"),
            "staging of a load": lambda: fastckpt.load(self.path / "c", into=state),
        }.items():
            fastckpt.background.release_buffers()
            outcome = call()
            kept = [*kept_memory(), *kept_memory(staging=True)]
            assert len(kept) == 1, name
            kept[0].registration.wait()
            assert kept[0].problem is None, name
            tensor = torch.from_numpy(
                np.ctypeslib.as_array((ctypes.c_uint8 * kept[0].nbytes).from_address(kept[0].core.address))
            )
            assert tensor.is_pinned(), name
            assert tensor[-1:].is_pinned(), name
            assert not getattr(outcome, "warnings", ()), name

    def test_an_error_stays_in_the_thread_that_has_it(self):
        """Pinning assumes that CUDA behaves as tested here."""
        data = np.zeros(1 * MIB, np.uint8)
        address = -(-data.ctypes.data // 4096) * 4096
        results = []

        def register():
            cudart = torch.cuda.cudart()
            results.extend(int(cudart.cudaHostRegister(address, 4096, 1)) for _ in range(2))
            results.append(int(cudart.cudaHostUnregister(address)))

        thread = threading.Thread(target=register)
        thread.start()
        thread.join()
        assert results == [0, 712, 0]
        # A check after a kernel would raise an error that this thread had left behind.
        torch.zeros(10, device=DEVICE).add_(1)
        torch.cuda.synchronize()

    def test_a_cap(self):
        state = {"w": torch.arange(32 * MIB, dtype=torch.int32, device=DEVICE)}
        for pin in (False, 10 * MIB, True):
            report = fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(pin=pin)).result(60)
            assert len(report.warnings) == (type(pin) is int), report.warnings
            assert torch.equal(fastckpt.load(self.path / "c")["w"], there(state["w"]))


class TestAllocator(OnDevice):
    on = "cuda"

    @each("configuration", ["expandable_segments:True", "backend:cudaMallocAsync"])
    def test_other_configurations(self, configuration):
        """Run the same tests in a process with another allocator."""
        tests = [
            "device.test_async.TestAsync",
            "device.test_load.TestLoad",
            "device.test_save.TestSave",
        ]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": configuration}
        done = subprocess.run(
            [sys.executable, "-m", "unittest", *tests],
            cwd=TESTS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    def test_temporary_memory_of_the_device_is_small(self):
        state = {"rows": torch.zeros(64 * MIB, device=DEVICE), "columns": torch.zeros(4096, 8192, device=DEVICE).t()}
        state |= {f"small {index}": torch.zeros(1000, device=DEVICE) for index in range(5000)}
        fastckpt.save(state, self.path / "c")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fastckpt.save(state, self.path / "c")
        fastckpt.load(self.path / "c", into=state)
        assert torch.cuda.max_memory_allocated() - before <= 32 * 16 * MIB
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


class TestShardedModules(OnDevice):
    """FSDP2 in a group of one rank, which frees its unsharded parameters between uses."""

    on = "cuda"

    def setUp(self):
        super().setUp()
        if not torch.distributed.is_nccl_available():
            devices.missing("needs NCCL")
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            devices.missing("needs torch.distributed.fsdp.fully_shard (torch 2.6)")
        torch.cuda.set_device(DEVICE)
        store = torch.distributed.FileStore(tempfile.mktemp(dir=self.path), 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
        self.addCleanup(torch.distributed.destroy_process_group)
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
        for layer in self.model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(self.model, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self):
        self.model(torch.ones(8, 1024, device=DEVICE)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        return {name: value.full_tensor().detach().cpu() for name, value in self.model.state_dict().items()}

    def test_training_goes_on_beside_a_save(self):
        self.train()
        for turn in range(3):
            expected = self.whole()
            local = {name: value.to_local().detach() for name, value in self.model.state_dict().items()}
            pending = fastckpt.save_async(local, self.path / "local", io=fastckpt.IO(lazy=True))
            together = distributed.save_async(self.model.state_dict(), self.path / "all")
            for _ in range(3):
                self.train()
            pending.result(60)
            together.result(60)
            for name in ("local", "all"):
                loaded = fastckpt.load(self.path / name)
                assert all(torch.equal(loaded[key], value) for key, value in expected.items()), (turn, name)
        distributed.load(self.path / "all", into=self.model.state_dict())
        assert all(torch.equal(value, expected[name]) for name, value in self.whole().items())

    def test_unsharded_parameters_that_are_freed_while_they_are_copied(self):
        self.train()
        for turn in range(4):
            expected = self.whole()
            devices.busy()
            self.model.unshard()
            for layer in self.model:
                layer.unshard()
            full = {name: _local(value.detach()) for name, value in self.model.named_parameters()}
            pending = fastckpt.save_async(full, self.path / "full", io=fastckpt.IO(lazy=True))
            if turn == 0:
                # The memory of the first save is not pinned when it begins, so its copies may not be requested yet.
                pending.wait_staged(60)
            self.model.reshard()
            for layer in self.model:
                layer.reshard()
            full.clear()
            self.train()
            pending.result(60)
            loaded = fastckpt.load(self.path / "full")
            assert all(torch.equal(loaded[name], value) for name, value in expected.items()), turn


def _local(value):
    """Return a local tensor: in a group of one rank, an unsharded parameter may remain a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


class TestTime(OnDevice):
    on = "cuda"

    def test_a_lazy_save_holds_the_stream_and_not_the_host(self):
        parameters, optimizer = parameters_of(GIB)
        fastckpt.save_async(state_of(parameters), self.path / "c", io=fastckpt.IO(lazy=True)).result(60)
        stalls = []
        for turn in range(5):
            torch.cuda.synchronize()
            devices.busy(0.5)
            with host_waits() as waits:
                began = time.perf_counter()
                pending = fastckpt.save_async(state_of(parameters), self.path / "c", io=fastckpt.IO(lazy=True))
                optimizer.step()
                stalls.append(time.perf_counter() - began)
            assert waits == []
            # The requested step waits for the copies, which wait for earlier work in the stream.
            assert not torch.cuda.current_stream().query() or stalls[-1] > 0.3
            report = pending.result(60)
            assert report.stall <= stalls[-1]
            assert all(bool((value == 5 - turn).all()) for value in fastckpt.load(self.path / "c").values())
        assert min(stalls) < 0.05, stalls

    def test_no_operation_of_torch_waits_in_the_callers_thread(self):
        parameters, optimizer = parameters_of(64 * MIB)
        parameters[0].data.random_()
        for _ in range(2):
            fastckpt.save_async(state_of(parameters), self.path / "c", io=fastckpt.IO(lazy=True)).result(60)
        expected = {name: there(value) for name, value in state_of(parameters).items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = fastckpt.save_async(state_of(parameters), self.path / "c", io=fastckpt.IO(lazy=True))
            optimizer.step()
            pending.result(60)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loaded = fastckpt.load(self.path / "c")
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())

    def test_a_tensor_of_more_than_4_gib(self):
        nbytes = 4 * GIB + 12345
        if torch.cuda.mem_get_info()[0] < 3 * nbytes or shutil.disk_usage(self.path).free < 2 * nbytes:
            devices.missing("needs 13 GB of free memory on the device and 9 GB of free disk")
        value = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
        for at in (0, 2 * GIB, 4 * GIB - 1, 4 * GIB, nbytes - 1):
            value[at] = at % 251 + 1
        fastckpt.save({"w": value}, self.path / "c")
        loaded = fastckpt.load(self.path / "c", device=DEVICE)["w"]
        assert torch.equal(loaded, value)

    def test_what_is_in_flight_when_the_program_ends(self):
        """The checkpoint is whole and the process ends well, although memory is pinned and streams are in use."""
        program = (
            "import sys, torch, fastckpt\n"
            "state = {str(i): torch.full((1 << 22,), float(i), device='cuda') for i in range(16)}\n"
            "fastckpt.save_async(state, sys.argv[1] + '/a').result()\n"
            "fastckpt.save_async(state, sys.argv[1] + '/b', io=fastckpt.IO(lazy=True))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(self.path)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        for name in "ab":
            loaded = fastckpt.load(self.path / name)
            assert all(bool((value == int(key)).all()) for key, value in loaded.items())
