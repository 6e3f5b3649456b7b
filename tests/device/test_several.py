"""Several devices, streams, threads and kinds of saves in one process; damage; and a group of one rank."""

from __future__ import annotations

import tempfile
import threading

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt import distributed
from fastckpt.dcp import Reader, Stager, Writer
from harness import devices
from harness.devices import DEVICE, OTHER, OnDevice, each, fill_later, moved, on_device, raises, there, to_host
from harness.same import same
from harness.standin import faults

from .states import host_state

MIB = 1 << 20


class TestSeveral(OnDevice):
    def setUp(self):
        super().setUp()
        self.state = host_state()
        self.target = self.path / "c"
        fastckpt.save({**self.state, "array": np.arange(7)}, self.target)

    @each("mmap", [True, False])
    def test_a_damaged_checkpoint_is_refused(self, mmap):
        shard = next(entry for entry in self.target.iterdir() if entry.suffix == ".safetensors")
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        into = {name: moved(torch.zeros_like(value.detach())) for name, value in self.state.items()}
        with raises(fastckpt.CorruptCheckpointError, "large"):
            fastckpt.load(self.target, device=DEVICE, io=fastckpt.IO(mmap=mmap))
        with raises(fastckpt.CorruptCheckpointError, "large"):
            fastckpt.load(self.target, into=into, strict=False, io=fastckpt.IO(mmap=mmap))
        if mmap:
            # All pages are verified before anything is copied.
            assert all(not value.any() for name, value in to_host(into).items() if value.numel())
        with fastckpt.open(self.target, device=DEVICE) as checkpoint:
            with raises(fastckpt.CorruptCheckpointError, "large"):
                checkpoint["large"]
            assert torch.equal(there(checkpoint["half"]), self.state["half"])

    def test_to_several_devices_at_once(self):
        devices.two_devices()
        loaded = fastckpt.load(self.target, device={"large": OTHER, "half": OTHER, "array": "cpu", "*": DEVICE})
        loaded.pop("array")
        assert {name for name, value in loaded.items() if value.device == OTHER} == {"large", "half"}
        assert same(to_host(loaded), to_host(self.state))
        both = {"a": self.state["large"].to(DEVICE), "b": self.state["large"].to(OTHER)}
        fill_later(both["a"], 1)
        fill_later(both["b"], 2)
        fastckpt.save(both, self.path / "both")
        saved = fastckpt.load(self.path / "both", device="saved")
        assert [value.device for value in saved.values()] == [DEVICE, OTHER]
        assert [bool((value == number).all()) for number, value in enumerate(saved.values(), 1)] == [True, True]

    def test_in_a_stream_that_is_not_the_default_one(self):
        target = torch.zeros(3_000_000, device=DEVICE)
        fastckpt.save({"w": torch.arange(3_000_000.0)}, self.path / "w")
        devices.synchronize()
        with devices.side_stream():
            fill_later(target, 5)
            fastckpt.load(self.path / "w", into={"w": target})
            devices.busy()
            target.add_(1)
            fastckpt.save({"w": target}, self.path / "more")
        assert torch.equal(fastckpt.load(self.path / "more")["w"], torch.arange(3_000_000.0) + 1)

    def test_many_threads_load_at_once(self):
        problems = []

        def body():
            for _ in range(2):
                loaded = fastckpt.load(self.target, device=DEVICE)
                loaded.pop("array")
                if not same(to_host(loaded), to_host(self.state)):
                    problems.append(1)

        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []


class TestRanks(OnDevice):
    """A process group of one rank."""

    def setUp(self):
        super().setUp()
        store = torch.distributed.FileStore(tempfile.mktemp(dir=self.path), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)

    def test_small_tensors_of_any_size_share_a_copy(self):
        whole = torch.arange(20_000)
        state = {str(index): part.to(DEVICE) for index, part in enumerate(whole.split(7))}
        distributed.save_async(state, self.path / "c").result(60)
        before = faults.transfers
        distributed.save_async(state, self.path / "c").result(60)
        if devices.IS_STANDIN:
            assert faults.transfers - before <= 4
        loaded = fastckpt.load(self.path / "c")
        assert torch.equal(torch.cat([loaded[name] for name in state]), whole)

    @each("way", ["save", "async", "lazy"])
    def test_there_and_back(self, way):

        state = host_state()
        on = on_device(state)
        on["more"], state["more"] = moved(torch.arange(5 * MIB)), torch.arange(5 * MIB)
        for _ in range(2):
            devices.busy()
            if way == "save":
                distributed.save(on, self.path / "c")
            else:
                pending = distributed.save_async(on, self.path / "c", io=fastckpt.IO(lazy=way == "lazy"))
                pending.wait_staged()
                kept = there(on["more"])
                on["more"].fill_(-1)
                pending.result(60)
                on["more"].copy_(kept)
            into = on_device({name: torch.zeros_like(value.detach()) for name, value in state.items()})
            distributed.load(self.path / "c", into=into)
            assert same(to_host(into), {name: value.detach() for name, value in to_host(state).items()})
            loaded = distributed.load(self.path / "c", device=DEVICE)
            assert {value.device for value in loaded.values()} == {DEVICE}
            assert same(to_host(loaded), to_host(state))

    def test_torchs_own_checkpoints(self):
        state = {name: value.detach() for name, value in host_state().items() if value.numel()}
        on = on_device(state)
        devices.busy()
        on["half"].add_(1)
        dcp.save(on, storage_writer=Writer(str(self.path / "c")))
        into = on_device({name: torch.zeros_like(value) for name, value in state.items()})
        dcp.load(into, storage_reader=Reader(str(self.path / "c")))
        state["half"] = state["half"] + 1
        assert same(to_host(into), to_host(state))

    @each("keeps_memory", [False, True])
    def test_torchs_own_asynchronous_checkpoints(self, keeps_memory):
        values = {"w": torch.arange(3 * MIB, device=DEVICE), "b": torch.ones(5, device=DEVICE)}
        writer, stager = Writer(str(self.path / "c")), Stager()
        for turn in range(1 + keeps_memory):
            fill_later(values["b"], 7.0 + turn)
            future = dcp.async_save(values, storage_writer=writer, async_stager=stager)
            values["b"].fill_(-1)
            values["w"].add_(1)
            future.result()
            loaded = fastckpt.load(self.path / "c")
            assert torch.equal(loaded["w"], torch.arange(3 * MIB) + turn)
            assert loaded["b"].tolist() == [7 + turn] * 5
