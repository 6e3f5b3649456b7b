"""The contenders that save from a device and load to it. Each gets the name of the device; see bench.contenders."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench import peers
from bench.contenders import Contender, Dcp, Fastckpt, Safetensors, Spec, Torch
from bench.gpu_device import Device, Link, Pinned
from bench.states import total_bytes
from fastckpt._tools.bench import raw

if TYPE_CHECKING:
    from pathlib import Path

    Notes = dict[str, Any]


class OnDevice(Contender):
    """The base class: a load ends when the device has the bytes, and its result takes no host memory.

    Attributes:
        needs: the module that it requires, whose presence is checked without an import.
    """

    kinds = frozenset({"model", "many"})
    needs = "torch"

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = Device(device)
        self.where = str(self.device.device)

    def finish(self, loaded: Any, *, write: bool) -> None:
        if self.device.module is None:
            super().finish(loaded, write=write)
        self.device.synchronize()
        astray = [name for name, tensor in loaded.items() if tensor.device != self.device.device]
        if astray:
            raise ValueError(f"{astray[0]} was loaded to {loaded[astray[0]].device}, not to {self.where}")

    def release(self) -> None:
        super().release()
        # Other contenders need the device's memory.
        self.device.empty_cache()

    def kept(self, loaded: Any) -> int:
        return super().kept(loaded) if self.device.module is None else 0


class Storage(OnDevice):
    """The storage alone, from and to huge pages of the host, as ``fastckpt bench`` measures it."""

    title = "storage alone"
    is_device = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.raw = raw.Device()

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        return self.moved(self.raw.write(path / "raw", total_bytes(state)))

    def load(self, path: Path) -> Any:
        return self.moved(self.raw.read(path / "raw"))

    def moved(self, transfer: raw.Transfer) -> Notes:
        done = transfer.run(time.monotonic())
        self.note = "" if done["direct"] else "no direct I/O here: through the page cache"
        return {**done, "user": 0.0, "system": 0.0}


class LinkAlone(OnDevice):
    """The link alone, to and from pinned memory."""

    title = "link alone (pinned)"
    is_device = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.size = 0
        self.link = Link(self.device, piece=64 << 20)

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        self.size = total_bytes(state)
        return self.moved(to_host=True)

    def load(self, path: Path) -> Any:  # noqa: ARG002 - it has no files
        return self.moved(to_host=False)

    def moved(self, *, to_host: bool) -> Notes:
        seconds = self.link.copy(self.size, to_host=to_host)
        return {"bytes": self.size, "seconds": seconds, "user": 0.0, "system": 0.0}


class FastckptDevice(OnDevice, Fastckpt):
    """``fastckpt.save`` and ``fastckpt.load(device=)``, every byte verified."""

    kinds = OnDevice.kinds

    def __init__(self, device: str, io: str = "auto") -> None:
        OnDevice.__init__(self, device)
        Fastckpt.__init__(self, io=io)
        self.pinned = Pinned()
        self.pinned.install()

    def save(self, state: Any, path: Path) -> Notes:
        return {**super().save(state, path), "pinned": self.pinned.peak}

    def load(self, path: Path) -> Any:
        return self._loaded(path, device=self.where)


class TorchDevice(OnDevice, Torch):
    """``torch.save`` and ``torch.load(map_location=)``."""

    kinds = OnDevice.kinds

    def __init__(self, device: str) -> None:
        OnDevice.__init__(self, device)
        Torch.__init__(self)

    def load(self, path: Path) -> Any:
        return self.torch.load(path / "state.pt", weights_only=True, map_location=self.where)


class DcpDevice(OnDevice, Dcp):
    """``torch.distributed.checkpoint``: it loads into given tensors, made on the device as part of the load."""

    kinds = OnDevice.kinds

    def __init__(self, device: str) -> None:
        OnDevice.__init__(self, device)
        Dcp.__init__(self)

    def load(self, path: Path) -> Any:
        import torch

        reader = self.library.FileSystemReader(path)
        state = {
            name: torch.empty(about.size, dtype=about.properties.dtype, device=self.where)
            for name, about in reader.read_metadata().state_dict_metadata.items()
        }
        return self.load_into(path, state)


class TorchCheckpointingDevice(OnDevice, peers.TorchCheckpointing):
    """``torch_checkpointing``, its synchronous saver; ``load(map_location=)``."""

    kinds = OnDevice.kinds
    needs = "torch_checkpointing"

    def __init__(self, device: str) -> None:
        OnDevice.__init__(self, device)
        peers.TorchCheckpointing.__init__(self)

    def load(self, path: Path) -> Any:
        return self.manager.load(str(path), map_location=self.where)["state"]


class SafetensorsDevice(OnDevice, Safetensors):
    """``safetensors.torch.save_file`` and ``load_file(device=)``."""

    kinds = OnDevice.kinds
    needs = "safetensors"

    def __init__(self, device: str) -> None:
        OnDevice.__init__(self, device)
        Safetensors.__init__(self)

    def load(self, path: Path) -> Any:
        return self.library.load_file(path / "model.safetensors", device=self.where)


class SafetensorsPrefetch(OnDevice, peers.LoadsSafetensors):
    """The loader of safetensors 0.9 that reads ahead to a CUDA device."""

    title = "safetensors, prefetch"
    kinds = OnDevice.kinds
    needs = "safetensors"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        import safetensors

        if not hasattr(safetensors.safe_open, "prefetch"):
            raise ImportError(f"safetensors {safetensors.__version__} has no prefetch: install 0.9 or newer")
        self.open = safetensors.safe_open

    def load(self, path: Path) -> Any:
        with (
            self.open(path / "model.safetensors", framework="pt", device=self.where) as file,
            file.prefetch() as loader,
        ):
            return dict(loader)


class RunaiDevice(OnDevice, peers.RunaiModelStreamer):
    """``runai_model_streamer.SafetensorsStreamer`` onto the device."""

    kinds = OnDevice.kinds
    needs = "runai_model_streamer"

    def __init__(self, device: str) -> None:
        OnDevice.__init__(self, device)
        peers.RunaiModelStreamer.__init__(self)

    def load(self, path: Path) -> Any:
        with self.library.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path / "model.safetensors"), device=self.where)
            return {name: tensor.to(self.where) for name, tensor in streamer.get_tensors()}


class FastsafetensorsDevice(OnDevice, peers.Fastsafetensors):
    """``fastsafetensors.SafeTensorsFileLoader`` onto the device, with GPUDirect Storage or without."""

    kinds = OnDevice.kinds
    needs = "fastsafetensors"

    def __init__(self, device: str, *, gds: bool = False) -> None:
        OnDevice.__init__(self, device)
        peers.Fastsafetensors.__init__(self)
        self.gds = gds

    def load(self, path: Path) -> Any:
        loader = self.library.SafeTensorsFileLoader(self.library.SingleGroup(), self.device.device, nogds=not self.gds)
        loader.add_filenames({0: [str(path / "model.safetensors")]})
        buffers = loader.copy_files_to_device()
        self.standing = [loader, buffers]
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}


class InstantTensor(OnDevice, peers.LoadsSafetensors):
    """``instanttensor.safe_open``, whose tensors are its own copies."""

    title = "InstantTensor"
    kinds = OnDevice.kinds
    needs = "instanttensor"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        import instanttensor

        self.library = instanttensor

    def load(self, path: Path) -> Any:
        with self.library.safe_open(str(path / "model.safetensors"), framework="pt", device=self.where) as file:
            return dict(file.tensors())


def registry() -> dict[str, type[Contender]]:
    """Return every contender by name, in the order of the tables and of the first round: those with bars first."""
    return {
        "raw": Storage,
        "link": LinkAlone,
        "fastckpt": FastckptDevice,
        "torch": TorchDevice,
        "safetensors": SafetensorsDevice,
        "prefetch": SafetensorsPrefetch,
        "dcp": DcpDevice,
        "torch_checkpointing": TorchCheckpointingDevice,
        "runai": RunaiDevice,
        "fastsafetensors": FastsafetensorsDevice,
        "instanttensor": InstantTensor,
    }


def specs(device: str, names: tuple[str, ...] = ()) -> list[Spec]:
    """Return all contenders, or those of these kinds, for one device; fastsafetensors also with GPUDirect Storage."""
    kinds = [kind for kind in registry() if not names or kind in names]
    found = [Spec(kind) for kind in kinds]
    if device == "cuda" and "fastsafetensors" in kinds:
        # This comes last: cuFile may hang if it is not set up, and would use up the time of later contenders.
        found.append(Spec("fastsafetensors:gds", {"gds": True}, title="fastsafetensors, GDS"))
    return [
        Spec(spec.name, {**spec.options, "device": device}, spec.environment, spec.title, __name__) for spec in found
    ]
