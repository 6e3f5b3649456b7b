"""The contenders: fastckpt, the raw device, and the peers from torch and safetensors. bench.peers has more.

A contender saves a state, loads it, and loads it into existing memory. Its constructor imports its library and
raises ImportError if that is missing. A save ends when an fsync of every file and of the directory has returned:
otherwise it would measure how fast memory fills with dirty pages. The peers write under the final name; fastckpt is
also atomic, and pays for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import BLOCK
from bench.device import fsync_tree, transfer, transfer_name
from bench.states import fill, largest, total_bytes, touch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Notes = dict[str, Any]

FLAT = frozenset({"model", "one", "huge", "many", "small"})
NESTED = FLAT | {"optimizer"}
TENSORS_ONLY = "it stores only a flat dict of tensors, and this state is not one"


@dataclass(frozen=True)
class Spec:
    """A contender's name, keyword arguments and environment.

    The ``registry()`` of ``module`` has its class. Its process imports from the directory ``site`` first.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    module: str = "bench.contenders"
    site: str = ""

    @property
    def kind(self) -> str:
        """The name of the contender's class in the registry: the part before a colon."""
        return self.name.partition(":")[0]

    @property
    def contender(self) -> type[Contender]:
        """The contender's class, from the registry of ``module``."""
        found: type[Contender] = importlib.import_module(self.module).registry()[self.kind]
        return found


class Contender:
    """The base class of contenders.

    Attributes:
        title: the name of the contender in tables.
        kinds: the kinds of workloads that it can store.
        refusal: why it cannot store other kinds.
        saves: whether it saves at all; a contender that does not loads files of safetensors.
        note: a note for readers of its figures, or an empty string.
        is_device: whether it is the storage itself, which moves bytes without a state.
    """

    title = ""
    kinds = FLAT
    refusal = TENSORS_ONLY
    saves = True
    note = ""
    is_device = False

    def warm_up(self, path: Path) -> None:
        """Find out once, outside the timing, which options work here; may write to the directory ``path``."""

    def save(self, state: Any, path: Path) -> Notes:
        """Make ``state`` durable in the new directory ``path``."""
        raise NotImplementedError

    def load(self, path: Path) -> Any:
        """Return the state in ``path``."""
        raise NotImplementedError

    def load_into(self, path: Path, state: Any) -> Any:
        """Fill the tensors of ``state``: here by a copy of the loaded tensors, like ``load_state_dict``."""
        fill(state, self.load(path))
        return state

    def take_notes(self) -> Notes:
        """Return and clear the contender's notes about the last load."""
        return {}

    def finish(self, loaded: Any, *, write: bool) -> None:
        """End a load inside the timing: read every page of the result, or with ``write`` write to it."""
        touch(loaded, write=write)

    def kept(self, loaded: Any) -> int:
        """Return how many bytes of host memory the result of a load takes."""
        return total_bytes(loaded)

    def release(self) -> None:
        """Free the memory behind the last load's result, and other memory that is not needed until the next turn."""


class Torch(Contender):
    """``torch.save`` and ``torch.load``, as most training loops call them."""

    title = "torch.save, torch.load"
    kinds = NESTED

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        self.torch.save(state, path / "state.pt")
        fsync_tree(path)
        return {}

    def load(self, path: Path) -> Any:
        return self.torch.load(path / "state.pt", weights_only=True)


class TorchFile(Torch):
    """``torch.save`` and ``torch.load`` with the file objects of fastckpt: torch's format, and fastckpt's checksum."""

    title = "torch.save, fastckpt.open_write"

    def __init__(self) -> None:
        super().__init__()
        from fastckpt.integrations import torch as door

        self.door = door

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        with self.door.install():
            self.torch.save(state, path / "state.pt")
        return {}

    def load(self, path: Path) -> Any:
        with self.door.install():
            return super().load(path)


class Safetensors(Contender):
    """``safetensors.torch.save_file`` and ``load_file``."""

    title = "safetensors"

    def __init__(self) -> None:
        import safetensors.torch

        self.library = safetensors.torch

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        self.library.save_file(state, path / "model.safetensors")
        fsync_tree(path)
        return {}

    def load(self, path: Path) -> Any:
        return self.library.load_file(path / "model.safetensors")


class Dcp(Contender):
    """``torch.distributed.checkpoint`` in one process, two threads, its own fsync of files switched on."""

    title = "torch.distributed.checkpoint"
    kinds = NESTED

    def __init__(self) -> None:
        import torch.distributed.checkpoint as dcp

        # no_dist saves without a process group, and torch warns about that.
        warnings.simplefilter("ignore")
        self.library = dcp

    def save(self, state: Any, path: Path) -> Notes:
        writer = self.library.FileSystemWriter(path, thread_count=2, sync_files=True)
        self.library.save(state, storage_writer=writer, no_dist=True)
        fsync_tree(path)
        return {}

    def load(self, path: Path) -> Any:
        # DCP only loads into existing tensors; its own converter to torch.save makes them in this way.
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        state: dict[str, Any] = {}
        reader = self.library.FileSystemReader(path)
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state

    def load_into(self, path: Path, state: Any) -> Any:
        self.library.load(state, storage_reader=self.library.FileSystemReader(path), no_dist=True)
        return state


class Savez(Contender):
    """``numpy.savez`` and ``numpy.load``."""

    title = "numpy.savez"
    kinds = frozenset({"numpy"})

    def __init__(self) -> None:
        import numpy as np

        self.library = np

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        self.library.savez(path / "state.npz", **state)
        fsync_tree(path)
        return {}

    def load(self, path: Path) -> Any:
        with self.library.load(path / "state.npz") as file:
            return dict(file)


class SafetensorsNumpy(Safetensors):
    """``safetensors.numpy.save_file`` and ``load_file``."""

    title = "safetensors.numpy"
    kinds = frozenset({"numpy"})

    def __init__(self) -> None:
        import safetensors.numpy

        self.library = safetensors.numpy


def report_notes(report: Any) -> Notes:
    """Return the notes from a report of fastckpt."""
    return {
        "copied": report.copied,
        "engine": report.engine,
        "fallback": report.fallback,
        "threads": report.threads,
        "thread_bytes": list(report.thread_bytes),
        "shards": report.shards,
        "phases": dict(report.phases),
        "blocks": dict(report.blocks),
    }


class Fastckpt(Contender):
    """``fastckpt.save`` and ``fastckpt.load``, every byte verified unless a variant's name says otherwise."""

    title = "**fastckpt**"
    kinds = NESTED | {"numpy"}

    def __init__(
        self,
        io: str = "auto",
        threads: int | None = None,
        shards: int | None = None,
        bandwidth_limit: float | None = None,
        mmap: bool = False,
        verify: bool = True,
    ) -> None:
        import fastckpt

        self.library, self.shards = fastckpt, shards
        self.io = fastckpt.IO(
            io, threads=threads, bandwidth_limit=bandwidth_limit, mmap=mmap, verify=verify, on_report=self._note
        )
        self.report: Any = None

    def save(self, state: Any, path: Path) -> Notes:
        # A tensor is never split. A limit of one share plus the largest tensor gives the right number of shards.
        split = {"shard_size": total_bytes(state) // self.shards + largest(state)} if self.shards else {}
        report = self.library.save(state, path, io=self.io, files=self.library.Files(**split))
        self.note = f"engine {report.engine}: {report.fallback}" if report.fallback else ""
        return report_notes(report)

    def load(self, path: Path) -> Any:
        return self._loaded(path)

    def load_into(self, path: Path, state: Any) -> Any:
        if self.io.mmap:
            return super().load_into(path, state)
        return self._loaded(path, into=state)

    def _loaded(self, path: Path, **options: Any) -> Any:
        return self.library.load(path, io=self.io, **options)

    def _note(self, report: Any) -> None:
        self.report = report

    def take_notes(self) -> Notes:
        report, self.report = self.report, None
        return report_notes(report) if report is not None else {}


class Raw(Contender):
    """The device itself. Its notes hold the figures of the tool, which replace the measurements of this process."""

    title = f"raw device ({transfer_name()})"
    kinds = NESTED | {"numpy"}
    is_device = True

    def save(self, state: Any, path: Path) -> Notes:
        path.mkdir()
        size = -(-total_bytes(state) // BLOCK) * BLOCK
        return {**transfer(path / "raw", size, "write"), "bytes": size}

    def load(self, path: Path) -> Any:
        size = (path / "raw").stat().st_size
        return {**transfer(path / "raw", size, "read"), "bytes": size}


def registry() -> dict[str, type[Contender]]:
    """Return every contender by name, in the order of the tables."""
    from bench import peers

    return {
        "raw": Raw,
        "torch": Torch,
        "safetensors": Safetensors,
        "dcp": Dcp,
        **peers.REGISTRY,
        "savez": Savez,
        "safetensors.numpy": SafetensorsNumpy,
        "fastckpt": Fastckpt,
        "fastckpt.torch": TorchFile,
    }


def title(spec: Spec) -> str:
    """Return the name of this contender in tables."""
    return spec.title or spec.contender.title


# fastckpt's variants: an engine, a way of writing under the automatic engine, or a way of loading. The two ways of
# writing are chosen by an environment variable that exists for benchmarks only.
VARIANTS = {
    "auto": Spec("fastckpt"),
    **{
        engine: Spec(f"fastckpt:{engine}", {"io": engine}, title=f"fastckpt, io={engine}")
        for engine in ("uring", "threads", "buffered")
    },
    "slabs": Spec("fastckpt:slabs", {}, {"FASTCKPT_ZERO_COPY": "0"}, "fastckpt, through slabs"),
    "zero-copy": Spec("fastckpt:zero-copy", {}, {"FASTCKPT_ZERO_COPY": "1"}, "fastckpt, zero-copy"),
    "mmap": Spec("fastckpt:mmap", {"mmap": True}, title="fastckpt, IO(mmap=True)"),
    "mmap-only": Spec(
        "fastckpt:mmap-only", {"mmap": True, "verify": False}, title="fastckpt, IO(mmap=True, verify=False)"
    ),
    "torch-file": Spec("fastckpt.torch"),
}

# Another build of fastckpt, beside the installed one; its ``site`` is filled in later.
OTHER = Spec("fastckpt:other", title="fastckpt, the build of --against")


def knows(variable: str) -> bool:
    """Whether this build of fastckpt reads an environment variable: the compiled core contains its name.

    An ignored variable would be measured as if it had an effect.
    """
    from fastckpt import _core

    return variable.encode() in Path(_core.__file__).read_bytes()


@contextmanager
def environment(spec: Spec) -> Iterator[None]:
    """Set the variables and the import path for processes that start meanwhile."""
    former, path = {name: os.environ.get(name) for name in spec.environment}, sys.path.copy()
    os.environ.update(spec.environment)
    # A spawned process gets the import path of this process.
    sys.path[:0] = [spec.site] if spec.site else []
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
