"""GPUDirect Storage: blocks between the device and files. On the stand-in, a file that moves bytes by plain calls."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase, mock

import torch
from torch.distributed import checkpoint as dcp

import fastckpt
from fastckpt import _core
from fastckpt._tensors import device_sums, gds
from fastckpt.dcp import Reader, Writer
from harness import devices
from harness.devices import DEVICE, IS_STANDIN, OnDevice, each, fill_later, missing, moved, raises, there
from harness.same import same

MIB = 1 << 20
#: A quarter of a block.
UNIT = 64 << 10


class PlainFile:
    """As :class:`gds.CuFile`: the stand-in's memory is host memory."""

    #: What happens at each call: takes its number, the verb and the address.
    fault: Any = None
    #: Bytes of all calls.
    sizes: list[int]

    def __init__(self, _: Any, path: str, *, write: bool) -> None:
        self.fd = os.open(path, os.O_RDWR if write else os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.fd)

    @staticmethod
    def missing(_: Any) -> str | None:
        return None

    @classmethod
    def call(cls, verb: str, address: int, nbytes: int) -> None:
        cls.sizes.append(nbytes)
        if cls.fault is not None:
            cls.fault(len(cls.sizes), verb, address)

    def write(self, address: int, nbytes: int, offset: int) -> None:
        self.call("write", address, nbytes)
        assert os.pwrite(self.fd, ctypes.string_at(address, nbytes), offset) == nbytes

    def read(self, address: int, nbytes: int, offset: int) -> None:
        self.call("read", address, nbytes)
        data = os.pread(self.fd, nbytes, offset)
        ctypes.memmove(address, data, nbytes)
        assert len(data) == nbytes


class WithGds(OnDevice):
    """Tests that need files of the device."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(mock.patch.dict(os.environ, FASTCKPT_BLOCK_SIZE=str(4 * UNIT)))
        if IS_STANDIN:
            PlainFile.fault, PlainFile.sizes = None, []
            self.patch(mock.patch.dict(gds.KINDS, {DEVICE.type: PlainFile}))
            # Half precision is slow on processors; tests/tensors has it.
            self.patch(mock.patch.object(device_sums, "_number", return_value=torch.float32))
            return
        report = fastckpt.save(
            {"w": torch.zeros(8 * UNIT, dtype=torch.uint8, device=DEVICE)}, self.path / "c", io="gds"
        )
        if not report.blocks["gds"]:
            missing(f"GPUDirect Storage: {report.fallback}")

    def patch(self, patcher: Any) -> None:
        patcher.start()
        self.addCleanup(patcher.stop)


def bytes_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def host_state() -> dict[str, torch.Tensor]:
    return {
        "large": bytes_of(37 * UNIT + 12).view(torch.float32),
        "half": bytes_of(9 * UNIT, 1).view(torch.bfloat16).view(-1, 8),
        "odd": bytes_of(9 * UNIT + 5, 2),
        "small": torch.arange(1000),
        "none": torch.empty(0),
    }


def inside(path: Path) -> int:
    """How many blocks lie inside one tensor."""
    size = 4 * UNIT
    ends = [(tensor.offset, tensor.offset + tensor.nbytes) for tensor in _core.Reader(str(path)).tensors()]
    return sum(max(0, end // size - -(-begin // size)) for begin, end in ends)


def on_device(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: moved(value) for name, value in state.items()}


class TestGds(WithGds):
    def test_blocks_go_between_the_device_and_files(self):
        state = host_state()
        saved = fastckpt.save(on_device(state), self.path / "c", io="gds")
        assert same(fastckpt.load(self.path / "c"), state)
        assert fastckpt.verify(self.path / "c").ok
        loaded = fastckpt.load(self.path / "c", device=DEVICE, io="gds", report=True)
        assert same({name: there(value) for name, value in loaded.state.items()}, state)
        for report in (saved, loaded.report):
            assert report.blocks["gds"] == report.paths["gds"] == inside(self.path / "c") == 10, report
            assert report.fallback is None
        assert saved.bytes == loaded.report.bytes == sum(value.nbytes for value in state.values())

    def test_into_tensors_that_are_there(self):
        state = host_state()
        fastckpt.save(state, self.path / "c")
        into = on_device({name: torch.zeros_like(value) for name, value in state.items()})
        loaded = fastckpt.load(self.path / "c", into=into, io="gds", report=True)
        assert loaded.report.blocks["gds"] == inside(self.path / "c")
        assert same({name: there(value) for name, value in into.items()}, state)

    def test_what_the_streams_were_asked_for_before(self):
        """The device still computes what is to be saved, and writes to what is to be loaded."""
        tensor = torch.empty(12 * UNIT, dtype=torch.uint8, device=DEVICE)
        fill_later(tensor, 7)
        assert fastckpt.save({"w": tensor}, self.path / "c", io="gds").blocks["gds"] == 2
        assert (fastckpt.load(self.path / "c")["w"] == 7).all()
        fill_later(tensor, 8)
        fastckpt.load(self.path / "c", into={"w": tensor}, io="gds")
        devices.synchronize()
        assert (there(tensor) == 7).all()

    def test_tensors_in_another_order_go_the_usual_way(self):
        wide = moved(bytes_of(16 * UNIT).view(torch.float32).view(512, 512))
        complex_ = moved(bytes_of(16 * UNIT, 1).view(torch.complex64))
        state = {"t": wide.t(), "conj": complex_.conj(), "host": bytes_of(9 * UNIT, 2)}
        report = fastckpt.save(state, self.path / "c", io="gds")
        assert report.blocks["gds"] == 0
        assert report.fallback == "gds: no tensor on a device is contiguous and large enough for a block"
        loaded = fastckpt.load(self.path / "c")
        assert same(
            loaded, {"t": there(wide).t(), "conj": there(complex_).conj().resolve_conj(), "host": state["host"]}
        )

    def test_a_load_that_converts_goes_the_usual_way(self):
        fastckpt.save({"w": torch.arange(3 * UNIT, dtype=torch.float32)}, self.path / "c")
        loaded = fastckpt.load(self.path / "c", device=DEVICE, dtype="float64", io="gds", report=True)
        assert loaded.report.fallback == "gds: no tensor is on a device, or all are converted on the way"
        assert torch.equal(there(loaded.state["w"]), torch.arange(3 * UNIT, dtype=torch.float64))

    def test_tensors_that_are_too_small(self):
        """None of them has a whole block in it."""
        state = {str(number): bytes_of(3 * UNIT, number) for number in range(4)}
        report = fastckpt.save(on_device(state), self.path / "c", io="gds")
        assert report.fallback == "gds: no block of the checkpoint lies inside one tensor on a device"
        assert same(fastckpt.load(self.path / "c"), state)

    def test_reads_of_an_open_checkpoint(self):
        state = host_state()
        fastckpt.save(state, self.path / "c")
        with fastckpt.open(self.path / "c", device=DEVICE, io="gds") as checkpoint:
            assert torch.equal(there(checkpoint["odd"]), state["odd"])
            assert checkpoint.report.blocks["gds"] == 1
            # A box comes the usual way.
            assert torch.equal(there(checkpoint.slice("odd", slice(3, None))), state["odd"][3:])
            assert checkpoint.report.blocks["gds"] == 0

    @each("verify", [True, False])
    def test_damage(self, verify):
        state = {"first": bytes_of(5 * UNIT), "second": bytes_of(13 * UNIT)}
        fastckpt.save(on_device(state), self.path / "c", io="gds")
        with next((self.path / "c").glob("*.safetensors")).open("r+b") as file:
            file.seek(10 * UNIT)
            byte = file.read(1)
            file.seek(10 * UNIT)
            file.write(bytes([byte[0] ^ 16]))
        if verify:
            with raises(fastckpt.CorruptCheckpointError, "bytes 524288 to 786432 .tensor `second`.: checksum is"):
                fastckpt.load(self.path / "c", device=DEVICE, io="gds")
        else:
            loaded = fastckpt.load(self.path / "c", device=DEVICE, io="gds", verify=False)
            assert (there(loaded["second"]) != state["second"]).sum() == 1
            assert torch.equal(there(loaded["first"]), state["first"])

    def test_checksums_of_a_device_are_checked_first(self):
        self.patch(mock.patch.object(device_sums, "_checked", {}))
        state = host_state()
        with mock.patch.object(device_sums, "_PROBE_SUM", 1):
            report = fastckpt.save(on_device(state), self.path / "c", io="gds")
        assert (report.blocks["gds"], report.fallback) == (0, f"gds: checksums made on {DEVICE} are wrong")
        assert same(fastckpt.load(self.path / "c"), state)

    def test_a_device_that_was_full_once_is_asked_again(self):
        self.patch(mock.patch.object(device_sums, "_checked", {}))
        full = RuntimeError("out of memory\nmore of it")
        with mock.patch.object(gds._sums, "enqueue", side_effect=full):
            report = fastckpt.save(on_device(host_state()), self.path / "c", io="gds")
        assert report.fallback == f"gds: checksums cannot be made on {DEVICE}: out of memory"
        report = fastckpt.save(on_device(host_state()), self.path / "c", io="gds")
        assert report.fallback is None
        assert report.blocks["gds"]

    def test_a_limit_of_the_bandwidth(self):
        report = fastckpt.save(on_device(host_state()), self.path / "c", io="gds", bandwidth_limit="5MB")
        assert report.blocks["gds"] == inside(self.path / "c")
        # Blocks are paid for before they move; a fifth of a second is made up for, by either of the two limits.
        assert report.seconds > report.bytes / 5e6 - 2 * 0.2


def quick_sum(chunk: torch.Tensor) -> int:
    from fastckpt import _crc64

    return _crc64.of(ctypes.string_at(chunk.data_ptr(), chunk.nbytes))


class TestGdsOnTheStandin(WithGds):
    """Faults and counts."""

    on = "standin"

    def setUp(self) -> None:
        super().setUp()
        del os.environ["FASTCKPT_BLOCK_SIZE"]
        # Many megabytes: by matrix products, the processor would take minutes.
        self.patch(mock.patch.object(device_sums, "enqueue", lambda _torch, data, length: data.view(-1, length)))
        self.patch(mock.patch.object(device_sums, "collect", lambda chunks, _: [quick_sum(chunk) for chunk in chunks]))

    def test_calls_move_sixteen_mebibytes(self):
        state = {"w": torch.zeros(100 * MIB, dtype=torch.uint8, device=DEVICE)}
        fastckpt.save(state, self.path / "c", io="gds")
        assert sorted(PlainFile.sizes) == [*[16 * MIB] * 6]
        fastckpt.load(self.path / "c", into=state, io="gds")
        assert sorted(PlainFile.sizes) == [*[16 * MIB] * 12]

    def test_small_neighbours_share_a_call(self):
        """A block each."""
        calls = []
        move = gds.Direct.move

        def counted(self: Any, stretches: Any, block: int) -> list[int]:
            calls.append(len(stretches))
            return move(self, stretches, block)

        state = {str(number): bytes_of(8 * MIB, number) for number in range(8)}
        self.patch(mock.patch.object(gds.Direct, "move", counted))
        fastckpt.save(on_device(state), self.path / "c", io="gds")
        assert calls == [4, 4]
        assert same(fastckpt.load(self.path / "c"), state)

    def test_many_files(self):
        """No more of them are open than a few."""
        state = {str(number): bytes_of(9 * MIB, number) for number in range(12)}
        report = fastckpt.save(on_device(state), self.path / "c", io="gds", shard_size=MIB)
        assert (report.shards, report.blocks["gds"]) == (12, 12)
        assert same(fastckpt.load(self.path / "c"), state)
        assert fastckpt.verify(self.path / "c").ok

    @each("number", [1, 2, 4])
    def test_a_write_that_fails_is_made_the_usual_way(self, number):
        def fault(call: int, *_: Any) -> None:
            if call == number:
                raise OSError(5, "cuFile cannot write 16777216 bytes at 4194304: cuFile error 5001")

        PlainFile.fault = fault
        state = {"w": bytes_of(80 * MIB)}
        report = fastckpt.save(on_device(state), self.path / "c", io="gds")
        assert report.blocks["gds"] < 20
        assert "cuFile error 5001" in report.fallback
        assert report.fallback.startswith("gds: ")
        assert report.fallback.endswith(": the rest went through host memory")
        assert same(fastckpt.load(self.path / "c"), state)
        assert fastckpt.verify(self.path / "c").ok

    @each("number", [1, 3])
    def test_a_read_that_fails_is_made_the_usual_way(self, number):
        def fault(call: int, _: str, address: int) -> None:
            if call == number:
                ctypes.memset(address, 77, MIB)
                raise OSError(5, "no")

        state = {"w": bytes_of(80 * MIB)}
        fastckpt.save(state, self.path / "c")
        PlainFile.fault = fault
        loaded = fastckpt.load(self.path / "c", device=DEVICE, io="gds", report=True)
        assert torch.equal(there(loaded.state["w"]), state["w"])
        assert "no: the rest went through host memory" in loaded.report.fallback

    def test_a_file_that_cannot_be_opened(self):
        with mock.patch.object(PlainFile, "__init__", side_effect=OSError(22, "Invalid argument")):
            PlainFile.__del__, kept = lambda _: None, PlainFile.__del__
            report = fastckpt.save({"w": moved(bytes_of(20 * MIB))}, self.path / "c", io="gds")
            PlainFile.__del__ = kept
        assert report.blocks["gds"] == 0
        assert report.fallback == "gds: OSError: [Errno 22] Invalid argument: the rest went through host memory"
        assert same(fastckpt.load(self.path / "c"), {"w": bytes_of(20 * MIB)})

    def test_memory_that_changes_while_it_is_written(self):
        def fault(call: int, _: str, address: int) -> None:
            if call == 1:
                ctypes.memset(address + 100, 3, 1)

        PlainFile.fault = fault
        report = fastckpt.save({"w": moved(torch.zeros(12 * MIB, dtype=torch.uint8))}, self.path / "c", io="gds")
        assert "a tensor changed while it was written" in report.fallback
        assert fastckpt.verify(self.path / "c").ok

    def test_an_interrupt(self):
        def fault(call: int, *_: Any) -> None:
            if call == 1:
                os.kill(os.getpid(), signal.SIGINT)

        PlainFile.fault = fault
        fastckpt.save({"before": torch.ones(3)}, self.path / "c")
        before = fastckpt.load(self.path / "c")
        with raises(KeyboardInterrupt, ""):
            fastckpt.save({"w": moved(bytes_of(20 * MIB))}, self.path / "c", io="gds")
        assert same(fastckpt.load(self.path / "c"), before)
        assert [entry.name for entry in self.path.iterdir()] == ["c"]
        assert not [thread for thread in threading.enumerate() if "gds" in thread.name]


class TestUnavailable(OnDevice):
    """The usual path, and why."""

    def test_no_tensor_on_a_device(self):
        state = {"w": bytes_of(9 * MIB)}
        saved = fastckpt.save(state, self.path / "c", io="gds")
        loaded = fastckpt.load(self.path / "c", io="gds", report=True)
        for report in (saved, loaded.report):
            assert report.fallback == "gds: no tensor is on a device, or all are converted on the way"
        assert same(loaded.state, state)

    def test_operations_that_go_through_host_memory(self):
        state = {"w": moved(bytes_of(9 * MIB))}
        report = fastckpt.save_async(state, self.path / "c", io="gds").result(60)
        assert report.fallback.startswith("gds: this operation goes through host memory")
        assert same(fastckpt.load(self.path / "c"), {"w": bytes_of(9 * MIB)})
        with raises(ValueError, "verify: io must be one of auto, uring, threads, direct, buffered, not 'gds'"):
            fastckpt.verify(self.path / "c", io="gds")
        with raises(ValueError, "probe: io must be one of auto, uring, threads, direct, buffered, not 'gds'"):
            fastckpt.probe(self.path, io="gds")

    def test_checkpoints_of_torch(self):
        """What ``fastckpt.save`` takes, its writer and reader take, too."""
        writer, reader = Writer(self.path / "c", io="gds"), Reader(self.path / "c", io="gds")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is|.*TypedStorage is deprecated")
            dcp.save({"w": moved(bytes_of(9 * MIB))}, storage_writer=writer, no_dist=True)
            state = {"w": moved(torch.zeros(9 * MIB, dtype=torch.uint8))}
            dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(there(state["w"]), bytes_of(9 * MIB))
        for report in (writer.report, reader.report):
            assert report.fallback.startswith("gds: this operation goes through host memory")

    def test_another_kind_of_device(self):
        with mock.patch.dict(gds.KINDS, clear=True):
            report = fastckpt.save({"w": moved(bytes_of(9 * MIB))}, self.path / "c", io="gds")
        assert report.fallback == f"gds: {DEVICE} is not a CUDA device"
        assert same(fastckpt.load(self.path / "c"), {"w": bytes_of(9 * MIB)})


class TestCuFile(TestCase):
    """Calls of the library, which is not asked for anything here."""

    def setUp(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.outcomes: list[int] = []
        self.errno = 0

    def make(self) -> gds.CuFile:
        def call(*arguments: int) -> int:
            self.calls.append(arguments)
            ctypes.set_errno(self.errno)
            return self.outcomes.pop(0)

        library = SimpleNamespace(cuFileWrite=call, cuFileRead=call)
        files = SimpleNamespace(GdsFile=lambda *_: SimpleNamespace(handle=99))
        with mock.patch.object(gds, "_library", return_value=library), mock.patch.object(gds, "_open"):
            return gds.CuFile(SimpleNamespace(cuda=SimpleNamespace(gds=files)), "f", write=True)

    def test_a_call_that_moves_less_is_followed_by_another(self):
        self.outcomes = [4096, 1000, 3096]
        self.make().write(5000, 8192, 70_000)
        assert self.calls == [
            (99, 5000, 8192, 70_000, 0),
            (99, 5000, 4096, 74_096, 4096),
            (99, 5000, 3096, 75_096, 5096),
        ]

    def test_errors_say_what_the_library_says(self):
        for outcome, errno, text in [
            (-1, 28, "cuFile cannot write 10 bytes at 20: No space left on device"),
            (-5030, 0, "cuFile cannot write 10 bytes at 20: cuFile error 5030"),
            (0, 0, "cuFile cannot write 10 bytes at 20: end of file"),
        ]:
            self.outcomes, self.errno = [outcome], errno
            with raises(OSError, text):
                self.make().write(1, 10, 20)

    def test_why_there_is_none(self):
        modern = SimpleNamespace(GdsFile=None)

        def why(cuda: str | None, files: Any) -> str | None:
            torch_ = SimpleNamespace(
                __version__="2.6.0", version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(gds=files)
            )
            return gds.CuFile.missing(torch_)

        assert why(None, modern) == "this torch was built without CUDA"
        assert why("12.4", None) == "torch 2.6.0 has no torch.cuda.gds.GdsFile, which came with 2.7"
        with mock.patch.object(gds, "_LIBRARY", "libnone.so.0"):
            assert why("12.4", modern) == "this torch was built without cuFile (libnone.so.0)"


class TestPaths(OnDevice):
    def test_a_file_system_without_direct_io_is_an_error_of_the_file_alone(self):
        """It is closed again, and cuFile is not asked."""
        if not Path("/proc/self/status").exists():
            missing("needs /proc")
        with raises(OSError, "Invalid argument|Permission denied"):
            gds.CuFile(torch, "/proc/self/status", write=True)
