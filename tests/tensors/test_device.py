"""Tensors of another device: saved, staged and loaded piece by piece, in streams, through slabs that take turns."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import _core
from fastckpt._background import snapshot_memory as _memory
from fastckpt._tensors import device as _device
from fastckpt._tensors import torch as _torch
from harness import needs, standin
from harness.same import same

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

DEVICE = torch.device("standin", 0)
SAVES = {
    "save": fastckpt.save,
    "async": lambda *arguments, **named: fastckpt.save_async(*arguments, **named).result(60),
    "lazy": lambda *arguments, **named: fastckpt.save_async(*arguments, lazy=True, **named).result(60),
}


@pytest.fixture(autouse=True)
def late(monkeypatch):
    yield from standin.late(monkeypatch, 0.002)


@pytest.fixture
def pinned(monkeypatch):
    """Snapshots count as pinned memory, as CUDA's do."""
    pins = []

    def pin(device, address, nbytes):
        assert device == DEVICE
        undo = _device._registered(address, nbytes, lambda: pins.remove((address, nbytes)))
        pins.append((address, nbytes))
        return undo

    monkeypatch.setattr(_torch, "pin", pin)
    return pins


def host_state():
    torch.manual_seed(1)
    large = torch.randint(-(2**31), 2**31 - 1, (700, 500), dtype=torch.int32)
    return {
        "large": large,
        "half": torch.randn(100_001).bfloat16(),
        "bytes": torch.randint(0, 255, (200_003,), dtype=torch.uint8),
        "double": torch.randn(3, 5, 7001, dtype=torch.float64),
        "wide": torch.randn(5000, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "float8": torch.randn(70_000).to(torch.float8_e4m3fn),
        "grad": torch.randn(10, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(300, 300)),
    }


def on_device(state):
    def move(value):
        moved = value.detach().to(DEVICE)
        return _torch.with_flags(moved, ("p" if type(value) is torch.nn.Parameter else "") + "g" * value.requires_grad)

    return {name: move(value) for name, value in state.items()}


def to_host(state):
    """As the memory is at this moment, whatever streams have still to do."""
    return {name: standin.on_host(value).clone() for name, value in state.items()}


def test_the_stand_in_is_late_and_in_order():
    source = torch.arange(1000.0)
    target = torch.empty(1000, device=DEVICE)
    assert (target.device, target.is_cpu, target.data_ptr() != 0) == (DEVICE, False, True)
    stale = torch.zeros(1000)
    standin.faults.late = 0.2
    target.copy_(source, non_blocking=True)
    stale.copy_(target, non_blocking=True)
    assert (stale == 0).all()
    standin._default.synchronize()
    assert (stale == source).all()


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("pin", [False, True])
def test_what_is_on_a_device_is_saved(tmp_path, way, pin, request):
    pins = request.getfixturevalue("pinned") if pin else []
    state = host_state()
    moved = on_device(state)
    moved["strided"], state["strided"] = moved["large"].t(), state["large"].t().contiguous()
    moved["some"], state["some"] = moved["double"][1:, ::2, 5:-5], state["double"][1:, ::2, 5:-5].contiguous()
    moved["conj"], state["conj"] = moved["wide"].conj(), state["wide"].conj().resolve_conj()
    moved["neg"], state["neg"] = torch._neg_view(moved["double"]), -state["double"]
    moved["host"] = state["host"] = np.arange(50_000)
    moved["tied"], state["tied"] = moved["large"], state["large"]
    report = SAVES[way](moved, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert same(loaded, state)
    assert loaded["tied"].data_ptr() == loaded["large"].data_ptr()
    assert fastckpt.verify(tmp_path / "c").ok
    assert bool(pins) == (pin and way != "save")
    fastckpt.release_buffers()
    assert pins == []
    assert report.bytes == sum(v.nbytes for k, v in state.items() if k != "tied")


@pytest.mark.parametrize("way", SAVES)
def test_a_save_sees_what_the_stream_was_asked_for_before(tmp_path, way, late):
    """The caller's stream is still computing when the save is called."""
    late.late = 0.05
    state = {str(index): torch.empty(5000, device=DEVICE) for index in range(4)}
    for index, value in enumerate(state.values()):
        value.copy_(torch.full((5000,), float(index + 1)), non_blocking=True)
    SAVES[way](state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert [float(loaded[str(index)].mean()) for index in range(4)] == [1, 2, 3, 4]


def test_the_state_may_change_when_save_async_returns(tmp_path, late):
    state = {str(index): torch.full((50_000,), float(index)).to(DEVICE) for index in range(4)}
    for turn in range(5):
        pending = fastckpt.save_async(state, tmp_path / "c")
        late.late = 0.0
        for value in state.values():
            value.copy_(torch.full((50_000,), -1.0))
        late.late = 0.002
        pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")
        assert all((loaded[str(index)] == index).all() for index in range(4)), turn
        for index, value in enumerate(state.values()):
            value.copy_(torch.full((50_000,), float(index)))


def test_a_strided_tensor_needs_little_more_memory_on_its_device(tmp_path, late):
    """Piece by piece: no copy is larger than what is gathered, whatever the size of the tensor."""
    late.late = 0.0
    value = torch.arange(2_000_000, dtype=torch.float32).reshape(1000, 2000)
    state = {"t": value.to(DEVICE).t()}
    late.largest = 0
    fastckpt.save(state, tmp_path / "c")
    assert 0 < late.largest <= 1 << 16
    assert torch.equal(fastckpt.load(tmp_path / "c")["t"], value.t())


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("fault", ["fail_at", "refuse_at"])
@pytest.mark.parametrize("pin", [False, True])
def test_an_error_in_the_middle_reaches_the_caller_and_leaves_nothing(tmp_path, way, fault, pin, late, request):
    if pin:
        request.getfixturevalue("pinned")
    state = on_device(host_state())
    fastckpt.save({"old": 1}, tmp_path / "c")
    for number in (1, 7):
        setattr(late, fault, late.copies + number)
        with pytest.raises(RuntimeError, match="standin: "):
            SAVES[way](state, tmp_path / "c")
        assert fastckpt.load(tmp_path / "c") == {"old": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
        late.reset(late=0.002)
    # Nothing that failed is used again.
    expected = to_host(state)
    SAVES[way](state, tmp_path / "c")
    assert same(to_host(fastckpt.load(tmp_path / "c")), expected)


@pytest.mark.parametrize("framework", ["auto", "torch"])
def test_load_puts_new_tensors_on_the_device(tmp_path, framework):
    state = host_state()
    fastckpt.save({**state, "array": np.arange(5), "tied": state["large"]}, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", device="standin:0", framework=framework)
    array = loaded.pop("array")
    if framework == "torch":
        assert array.device == DEVICE
        array = array.cpu().numpy()
    assert (array == np.arange(5)).all()
    assert {value.device for value in loaded.values()} == {DEVICE}
    assert loaded.pop("tied").data_ptr() == loaded["large"].data_ptr()
    assert [type(loaded[name]) for name in ("parameter", "grad")] == [torch.nn.Parameter, torch.Tensor]
    assert loaded["grad"].requires_grad
    assert same(to_host(loaded), to_host(state))
    assert fastckpt.load(tmp_path / "c", keys="half", device=DEVICE)["half"].device == DEVICE
    assert fastckpt.load(tmp_path / "c", keys="half", device="cpu")["half"].is_cpu


def test_load_fills_tensors_of_the_device(tmp_path):
    state = host_state()
    fastckpt.save({**state, "t": state["large"].t().contiguous(), "c": state["wide"]}, tmp_path / "c")
    into = on_device({name: torch.zeros_like(value.detach()) for name, value in state.items()})
    base = torch.zeros(1000, 1400, dtype=torch.int32).to(DEVICE)
    into["t"] = base[::2, ::2]
    into["c"] = torch.zeros(5000, dtype=torch.complex128).to(DEVICE).conj()
    fastckpt.load(tmp_path / "c", into=into)
    into["c"] = into["c"].conj()
    found = to_host(into)
    assert torch.equal(found.pop("t").contiguous(), state["large"].t())
    assert torch.equal(found.pop("c").resolve_conj(), state["wide"].conj().resolve_conj())
    assert same(found, to_host(state))


def test_elements_that_a_block_cuts_arrive_whole(tmp_path):
    """Not what the plan does for aligned tensors, but what a foreign file may ask for."""
    value = torch.randn(1000, dtype=torch.float64)
    moved = value.to(DEVICE)
    mover = _torch.mover_out(moved)
    out = np.zeros(8000, np.uint8)
    for start, end in ((0, 3), (3, 4001), (4001, 7999), (7999, 8000)):
        mover(start, out.ctypes.data + start, end - start)
    assert out.tobytes() == value.numpy().tobytes()
    target = torch.zeros(1000, dtype=torch.float64).to(DEVICE)
    into = _torch.mover_in(target)
    for start, end in ((0, 3), (3, 4001), (4001, 7999), (7999, 8000)):
        into(start, out.ctypes.data + start, end - start)
    _device.settle([into])
    assert torch.equal(target.cpu(), value)


def test_an_upload_that_fails_fails_the_load(tmp_path, late):
    state = host_state()
    fastckpt.save(state, tmp_path / "c")
    for fault, number in (("fail_at", 1), ("fail_at", 9), ("refuse_at", 5)):
        setattr(late, fault, late.copies + number)
        with pytest.raises(RuntimeError, match="standin: "):
            fastckpt.load(tmp_path / "c", device=DEVICE)
        late.reset(late=0.002)
        fastckpt.release_buffers()
    assert same(to_host(fastckpt.load(tmp_path / "c", device=DEVICE)), to_host(state))


def test_arguments_of_device(tmp_path):
    fastckpt.save({"w": torch.zeros(3)}, tmp_path / "c")
    with pytest.raises(ValueError, match="device must be"):
        fastckpt.load(tmp_path / "c", device="nonsense")
    with pytest.raises(ValueError, match="device must be"):
        fastckpt.load(tmp_path / "c", device=3.5)
    with pytest.raises(ValueError, match="those of into stay"):
        fastckpt.load(tmp_path / "c", device="standin", into={"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="on no device"):
        fastckpt.load(tmp_path / "c", device="standin", framework="numpy")


def test_a_device_without_streams_is_waited_for(tmp_path, monkeypatch):
    module = torch.get_device_module(DEVICE)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.delattr(type(module), name)
    state = host_state()
    for way, save in SAVES.items():
        save(on_device(state), tmp_path / way)
        assert same(fastckpt.load(tmp_path / way), state)
    assert same(to_host(fastckpt.load(tmp_path / "save", device=DEVICE)), to_host(state))


@pytest.mark.parametrize("has_choice", [True, False])
def test_whoever_waits_for_a_copy_sleeps_where_the_device_has_the_choice(tmp_path, monkeypatch, has_choice):
    waited = []

    class Watched(standin.Event):
        def __init__(self, **options):
            if options and not has_choice:
                raise TypeError("an unexpected keyword argument")
            super().__init__(**options)

        def synchronize(self):
            waited.append(self.blocking)
            super().synchronize()

    monkeypatch.setattr(type(torch.get_device_module(DEVICE)), "Event", Watched)
    state = {"w": torch.arange(1 << 20).to(DEVICE)}
    fastckpt.save(state, tmp_path / "c")
    assert same(to_host(fastckpt.load(tmp_path / "c", device=DEVICE)), to_host(state))
    assert set(waited) == {has_choice}


def test_loads_and_saves_in_many_threads_share_the_lanes(tmp_path):
    state = host_state()
    fastckpt.save(state, tmp_path / "c")
    expected = to_host(state)
    problems = []

    def body(number):
        for turn in range(3):
            loaded = fastckpt.load(tmp_path / "c", device=DEVICE)
            fastckpt.save(loaded, tmp_path / f"{number}")
            if not same(to_host(fastckpt.load(tmp_path / f"{number}")), expected):
                problems.append((number, turn))

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize("way", SAVES)
def test_threads_select_the_device_first(tmp_path, way, late):
    moved = on_device(host_state())
    late.reset()
    problems = []

    def body():
        try:
            SAVES[way](moved, tmp_path / "c")
            fastckpt.load(tmp_path / "c", device=DEVICE)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert problems == []
    assert late.copies
    assert late.astray == 0


def test_a_load_waits_for_its_copies_whoever_else_loads(tmp_path, late, monkeypatch):
    """Another load begins and ends in the middle of its copies, and has not waited for the rest of them."""
    state = {"w": torch.randint(0, 1 << 30, (100_000,), dtype=torch.int32)}
    fastckpt.save(state, tmp_path / "c")
    fastckpt.save({"w": torch.zeros(10)}, tmp_path / "other")
    real = _device.upload
    others = []

    def send(*arguments):
        sent = real(*arguments)
        if not others:
            others.append(threading.Thread(target=fastckpt.load, args=(tmp_path / "other",), kwargs={"device": DEVICE}))
            others[0].start()
            others[0].join()
        return sent

    monkeypatch.setattr(_device, "upload", send)
    late.reset(late=0.1)
    loaded = fastckpt.load(tmp_path / "c", device=DEVICE)
    assert same(to_host(loaded), state)
    assert others


def test_pinned_memory_is_unpinned_before_it_is_unmapped(tmp_path, pinned):
    small = {"w": torch.zeros(100_000).to(DEVICE)}
    fastckpt.save_async(small, tmp_path / "c").result(60)
    first = list(pinned)
    fastckpt.save_async({"w": torch.zeros(2_000_000).to(DEVICE)}, tmp_path / "c").result(60)
    assert len(pinned) == 1
    assert pinned != first
    fastckpt.save_async(small, tmp_path / "c").result(60)
    assert len(pinned) == 1, "reused"
    assert len(_memory._free) == 1
    fastckpt.release_buffers()
    assert pinned == []


class Cudart:
    """CUDA's runtime, as far as pinning goes: each thread has a last error, kept until that thread asks for it."""

    def __init__(self, status):
        self.status = status
        self.calls = []
        self.last = threading.local()

    def _call(self, *call):
        self.calls.append((threading.get_ident(), *call))
        if self.status:
            self.last.error = self.status
        return self.status

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        return self._call("register", address, nbytes, flags)

    def cudaHostUnregister(self, address):  # noqa: N802
        return self._call("unregister", address)

    def launch(self):
        """What every check after a kernel does."""
        error, self.last.error = getattr(self.last, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


class FakeTorch:
    """torch with that runtime. A call must come with its device selected."""

    def __init__(self, cudart):
        self.cuda = self
        self.selected = threading.local()
        self._cudart = cudart

    def get_device_module(self, device):
        assert device.type == "cuda"
        return self

    @contextlib.contextmanager
    def device(self, device):
        self.selected.device = device
        yield
        self.selected.device = None

    def cudart(self):
        if threading.current_thread() is not threading.main_thread():
            assert self.selected.device is CUDA
        if isinstance(self._cudart, Exception):
            raise self._cudart
        return self._cudart


CUDA = torch.device("cuda", 3)


@pytest.mark.parametrize("status", [0, 2, 712])
def test_a_refused_pin_leaves_no_error_in_the_training_thread(status, caplog):
    cudart = Cudart(status)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    assert _device._is_pinned(4096, 8192) == (not status)
    cudart.launch()
    # What was pinned and is gone meanwhile cannot be unpinned.
    cudart.status = status or 713
    undo()
    cudart.launch()
    assert not _device._is_pinned(4096, 8192)
    assert [call[1:] for call in cudart.calls] == [("register", 4096, 8192, 1), ("unregister", 4096)][
        : 1 + (not status)
    ]
    assert threading.get_ident() not in {thread for thread, *_ in cudart.calls}
    told = f"cannot pin 8192 bytes for the snapshot (CUDA error {status})" if status else "cannot unpin 8192 bytes"
    # A save of the test before may log its end here.
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [told in message for message in warnings] == [True]


@pytest.mark.parametrize("failure", ["cudart", "thread"])
def test_a_pin_that_cannot_be_tried_is_done_without(failure, caplog, monkeypatch):
    cudart = Cudart(0)
    if failure == "cudart":
        cudart = RuntimeError("no CUDA here")
    else:

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    assert not _device._is_pinned(4096, 8192)
    undo()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("at", ["start", "join"])
def test_a_pin_that_is_interrupted_is_undone(at, monkeypatch):
    """Else the memory goes while CUDA still knows it."""
    cudart = Cudart(0)
    real = {name: getattr(threading.Thread, name) for name in ("start", "join")}
    interrupts = [KeyboardInterrupt()]
    registering, interrupted = threading.Event(), threading.Event()

    def slow(address, nbytes, flags):
        registering.set()
        assert interrupted.wait(60)
        return Cudart.cudaHostRegister(cudart, address, nbytes, flags)

    def interrupt():
        if interrupts:
            assert registering.wait(60)
            raise interrupts.pop()

    def start(thread):
        real["start"](thread)
        if at == "start":
            interrupt()

    def join(thread, timeout=None):
        if at == "join":
            interrupt()
        interrupted.set()
        real["join"](thread, timeout)

    cudart.cudaHostRegister = slow
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Thread, "join", join)
    try:
        with pytest.raises(KeyboardInterrupt):
            _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    finally:
        interrupted.set()
    assert [name for _, name, *_ in cudart.calls] == ["register", "unregister"]
    assert not _device._is_pinned(4096, 8192)


def test_a_pin_that_is_interrupted_before_it_begins_is_not_made(monkeypatch):
    """The thread is on its way, and nobody will wait for it."""
    cudart = Cudart(0)
    real = threading.Thread.start
    late = []

    def start(thread):
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    real(late[0])
    late[0].join()
    assert cudart.calls == []
    assert not _device._is_pinned(4096, 8192)


@pytest.mark.parametrize("begun", [False, True])
def test_memory_is_unpinned_despite_an_interrupt(begun, monkeypatch):
    cudart = Cudart(0)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    real = threading.Thread.start
    late = []

    def start(thread):
        if late:
            real(thread)
            return
        late.append(thread)
        if begun:
            real(thread)
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        undo()
    if not begun:
        real(late[0])
        late[0].join()
    assert [name for _, name, *_ in cudart.calls] == ["register", "unregister"]


@pytest.mark.parametrize("way", SAVES)
def test_expanded_tensors_and_where_they_were(tmp_path, way):
    base = torch.randn(70_000, 1)
    on = base.to(DEVICE)
    state = {"base": on, "wide": on.expand(70_000, 4), "grad": torch.nn.Parameter(on[:3].t().expand(5, 3))}
    SAVES[way](state, tmp_path / "c")
    reader = _core.Reader(str(tmp_path / "c"))
    assert json.loads(reader.structure()) == [
        *(["dict", 3], "base", ["tensor", 0, "", "standin:0"]),
        *("wide", ["expanded", [70_000, 4], ""], ["tensor", 0, "", "standin:0"]),
        *("grad", ["expanded", [5, 3], "pg"], ["tensor", 1, "", "standin:0"]),
    ]
    loaded = fastckpt.load(tmp_path / "c")
    assert torch.equal(loaded["wide"], base.expand(70_000, 4))
    assert loaded["wide"].data_ptr() == loaded["base"].data_ptr()
    there = fastckpt.load(tmp_path / "c", device=DEVICE)
    assert there["wide"].device == there["grad"].device == DEVICE
    assert there["wide"].stride() == (1, 0)
    assert type(there["grad"]) is torch.nn.Parameter
    assert torch.equal(standin.on_host(there["grad"]), base[:3].t().expand(5, 3))
    into = {"wide": torch.zeros(70_000, 1).to(DEVICE).expand(70_000, 4)}
    fastckpt.load(tmp_path / "c", into=into, keys="wide")
    assert torch.equal(standin.on_host(into["wide"]), base.expand(70_000, 4))
