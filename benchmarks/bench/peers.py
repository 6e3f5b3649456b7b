"""Peers that are installed separately from the project, each with its settings and the reasons for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bench import MB
from bench.contenders import NESTED, Contender, Torch
from bench.device import fsync_tree
from bench.states import model_state

if TYPE_CHECKING:
    from pathlib import Path

    Notes = dict[str, Any]


class TorchCheckpointing(Contender):
    """``torch_checkpointing``, its synchronous saver: the asynchronous one needs CUDA."""

    title = "torch_checkpointing"
    kinds = NESTED

    def __init__(self) -> None:
        import torch_checkpointing as library
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
        self.library = library
        self.saver, self.storage = SyncCheckpointSaverConfig, LocalFileSystemStorageConfig
        self.manager = self.make(direct=True)

    def make(self, *, direct: bool) -> Any:
        """Return a manager with O_DIRECT on (its default) or off."""
        config = self.library.CheckpointManager.Config(
            items={"state": self.library.ItemSpec()},
            save=self.saver(),
            storage_config=self.storage(use_direct_io=direct),
        )
        return self.library.CheckpointManager(config)

    def save(self, state: Any, path: Path) -> Notes:
        self.manager.save(str(path), {"state": state})
        fsync_tree(path)
        return {}

    def warm_up(self, path: Path) -> None:
        """Find out whether the peer's O_DIRECT works on this file system."""
        try:
            self.manager.save(str(path), {"state": model_state(MB)})
        except OSError as error:
            self.note = f"its O_DIRECT fails here ({error}) and is off"
            self.manager = self.make(direct=False)

    def load(self, path: Path) -> Any:
        return self.manager.load(str(path))["state"]

    def load_into(self, path: Path, state: Any) -> Any:
        return self.manager.load(str(path), into={"state": state})["state"]


class LoadsSafetensors(Contender):
    """A peer that only loads a file that safetensors writes outside the timing."""

    saves = False
    note = "only loads, from files that safetensors wrote"

    def save(self, state: Any, path: Path) -> Notes:
        import safetensors.torch

        path.mkdir()
        safetensors.torch.save_file(state, path / "model.safetensors")
        fsync_tree(path)
        return {}


class RunaiModelStreamer(LoadsSafetensors):
    """``runai_model_streamer.SafetensorsStreamer`` with its default concurrency, onto the CPU."""

    title = "runai-model-streamer"

    def __init__(self) -> None:
        import runai_model_streamer

        self.library = runai_model_streamer

    def load(self, path: Path) -> Any:
        with self.library.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path / "model.safetensors"))
            return dict(streamer.get_tensors())

    def load_into(self, path: Path, state: Any) -> Any:
        with self.library.SafetensorsStreamer() as streamer:
            # Tensors that are only read may stay in the streamer's buffers.
            streamer.stream_file(str(path / "model.safetensors"), owned=False)
            for name, tensor in streamer.get_tensors():
                state[name].copy_(tensor)
        return state


class Fastsafetensors(LoadsSafetensors):
    """``fastsafetensors.SafeTensorsFileLoader`` onto the CPU, without GPUDirect Storage."""

    title = "fastsafetensors"

    def __init__(self) -> None:
        import fastsafetensors
        import torch

        self.library, self.torch = fastsafetensors, torch
        self.standing: list[Any] = []

    def load(self, path: Path) -> Any:
        single, device = self.library.SingleGroup(), self.torch.device("cpu")
        loader = self.library.SafeTensorsFileLoader(single, device, nogds=True)
        loader.add_filenames({0: [str(path / "model.safetensors")]})
        buffers = loader.copy_files_to_device()
        # The tensors are views of these buffers and do not keep them alive.
        self.standing = [loader, buffers]
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    def load_into(self, path: Path, state: Any) -> Any:
        for name, tensor in self.load(path).items():
            state[name].copy_(tensor)
        return state

    def release(self) -> None:
        while self.standing:
            self.standing.pop().close()


class Tensorizer(Contender):
    """``tensorizer.TensorSerializer`` and ``TensorDeserializer``, without their optional hashes."""

    title = "tensorizer"

    def __init__(self) -> None:
        import tensorizer

        self.library = tensorizer

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        serializer = self.library.TensorSerializer(str(path / "model.tensors"))
        serializer.write_state_dict(state)
        serializer.close()
        fsync_tree(path)
        return {}

    def load(self, path: Path) -> Any:
        with self.library.TensorDeserializer(str(path / "model.tensors"), device="cpu") as deserializer:
            return {name: parameter.data for name, parameter in deserializer.items()}


class FastFileWriter(Torch):
    """DeepSpeed's ``FastFileWriter`` under ``torch.save``, like in its FastCheckpointEngine; ``torch.load``."""

    title = "DeepSpeed FastFileWriter"

    def __init__(self) -> None:
        super().__init__()
        from deepspeed import io
        from deepspeed.ops.op_builder import AsyncIOBuilder, UtilsBuilder

        # Both builders compile on first use; AsyncIOBuilder needs the headers of libaio, UtilsBuilder an accelerator.
        UtilsBuilder().load()
        self.library = io
        self.handle = AsyncIOBuilder().load().aio_handle(8 << 20, 8, False, True, 1)
        self.pinned = self.torch.zeros(64 << 20, dtype=self.torch.uint8)

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        config = self.library.FastFileWriterConfig(dnvme_handle=self.handle, pinned_tensor=self.pinned)
        writer = self.library.FastFileWriter(str(path / "state.pt"), config)
        self.torch.save(state, writer, _use_new_zipfile_serialization=False)
        writer.close()
        fsync_tree(path)
        return {}


REGISTRY: dict[str, type[Contender]] = {
    "torch_checkpointing": TorchCheckpointing,
    "runai": RunaiModelStreamer,
    "fastsafetensors": Fastsafetensors,
    "tensorizer": Tensorizer,
    "deepspeed": FastFileWriter,
}
