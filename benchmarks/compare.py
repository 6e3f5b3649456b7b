"""Save and load one state with torch, safetensors, torch.distributed.checkpoint and fastckpt, beside the raw device.

    python benchmarks/compare.py --size 2 --rounds 5 --markdown --json result.json
    python benchmarks/compare.py --size 0 --many 100000

How it measures, and why:

- **The state** is Llama-shaped, bfloat16, of random bytes: storage that compresses or deduplicates gains nothing.
- **Durable**: a save ends when an fsync of every file and of the directory has returned, or it would measure how fast
  memory fills with dirty pages. The peers write under the final name; fastckpt is atomic as well, and pays for it.
- **Cold**: the page cache is dropped before each load, through /proc/sys/vm/drop_caches or, where that is not allowed,
  with posix_fadvise file by file; the output says which. Every load ends when one byte of each page of the result has
  been read: safetensors maps the file and would otherwise return before it has read anything.
- **Verified**: fastckpt checks every checksum while it loads, as it does by default. In the first round every
  contender's result is compared with the state, outside the timing.
- **Raw** is fio with direct io_uring (4 MiB blocks, 8 in flight, file allocated beforehand, fsync at the end) or,
  without fio, eight Python threads with O_DIRECT. It is one more contender in every round, so that ratios are taken
  from the same minutes.
- **Interleaved**: each round runs every contender once, the next round begins with another one and goes the other way
  round, so that nobody always follows the same neighbour, and the figures are medians over the rounds: the speed of a
  shared disk drifts.
- **One process a contender**, started fresh, alive for all rounds as a training process is, and holding its own state:
  memory shared through fork() would be copied by the kernel when a direct write pins it.
- **CPU** is user and system time of all threads of that process. The kernel's own writeback of buffered writes is not
  in it, which favours the buffered peers.
- **Extra memory** is the peak of the resident set during the call, less what was resident before, less the loaded
  tensors themselves; the largest of all rounds, since a first call allocates what later ones reuse.

GB is 10^9 bytes, MB 10^6. ``--check`` exits with 1 when a bar is not met.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    import torch

    State = dict[str, torch.Tensor]

GB = 10**9
MB = 10**6
BLOCK = 4 << 20
IN_FLIGHT = 8
PEERS = ("torch", "safetensors", "dcp")


@dataclass(frozen=True)
class Sample:
    """One timed call: wall and CPU seconds, peak of extra memory in bytes, and what the contender says about it."""

    seconds: float
    cpu: float
    extra: int | None
    bytes: int
    notes: dict[str, Any] = field(default_factory=dict)


# -- the states --------------------------------------------------------------------------------------------------------


def llama_shapes(size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a Llama-like model of about ``size`` bytes in bfloat16."""
    width = 2048 if size >= GB else 1024 if size >= GB // 4 else 256
    hidden, key_value, vocabulary = width * 43 // 16, width // 4, 16 * width
    layer = [
        ("input_layernorm.weight", (width,)),
        ("self_attn.q_proj.weight", (width, width)),
        ("self_attn.k_proj.weight", (key_value, width)),
        ("self_attn.v_proj.weight", (key_value, width)),
        ("self_attn.o_proj.weight", (width, width)),
        ("post_attention_layernorm.weight", (width,)),
        ("mlp.gate_proj.weight", (hidden, width)),
        ("mlp.up_proj.weight", (hidden, width)),
        ("mlp.down_proj.weight", (width, hidden)),
    ]
    layer_bytes = 2 * (2 * width + 2 * width * width + 2 * key_value * width + 3 * hidden * width)
    layers = max(1, round((size - 4 * vocabulary * width) / layer_bytes))
    return [
        ("model.embed_tokens.weight", (vocabulary, width)),
        *((f"model.layers.{index}.{name}", shape) for index in range(layers) for name, shape in layer),
        ("model.norm.weight", (width,)),
        ("lm_head.weight", (vocabulary, width)),
    ]


def llama_state(size: int) -> State:
    """Return the state of :func:`llama_shapes`, filled with the same random bytes each time."""
    import numpy as np
    import torch

    random = np.random.SFC64(size)
    state = {}
    for name, shape in llama_shapes(size):
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensor.view(torch.int16).numpy().reshape(-1)[:] = random.random_raw(tensor.numel() // 4).view(np.int16)
        state[name] = tensor
    return state


def many_state(count: int) -> State:
    """Return ``count`` tensors of four bytes, each with memory of its own."""
    import torch

    return {f"parameter.{index:07d}": torch.tensor([index], dtype=torch.int32) for index in range(count)}


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous tensor as a NumPy vector."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def total_bytes(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


# -- the contenders: save(state, path) returns notes, load(path) the state -----------------------


def fsync(path: Path) -> None:
    """Make one file or one directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Torch:
    """``torch.save`` and ``torch.load``, as most training loops call them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def save(self, state: State, path: Path) -> dict[str, Any]:
        path.mkdir()
        self.torch.save(state, path / "state.pt")
        fsync(path / "state.pt")
        fsync(path)
        return {}

    def load(self, path: Path) -> State:
        loaded: State = self.torch.load(path / "state.pt", weights_only=True)
        return loaded


class Safetensors:
    """``safetensors.torch.save_file`` and ``load_file``."""

    def __init__(self) -> None:
        import safetensors.torch

        self.library = safetensors.torch

    def save(self, state: State, path: Path) -> dict[str, Any]:
        path.mkdir()
        self.library.save_file(state, path / "model.safetensors")
        fsync(path / "model.safetensors")
        fsync(path)
        return {}

    def load(self, path: Path) -> State:
        return self.library.load_file(path / "model.safetensors")


class Dcp:
    """``torch.distributed.checkpoint`` in one process, two threads, its own fsync of files switched on."""

    def __init__(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        # It warns that no process group is there, which is what no_dist asks for.
        warnings.simplefilter("ignore")
        self.torch, self.library = torch, dcp

    def save(self, state: State, path: Path) -> dict[str, Any]:
        writer = self.library.FileSystemWriter(path, thread_count=2, sync_files=True)
        self.library.save(state, storage_writer=writer, no_dist=True)
        fsync(path)
        return {}

    def load(self, path: Path) -> State:
        reader = self.library.FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        # It only loads into tensors that exist.
        state = {name: self.torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        self.library.load(state, storage_reader=reader, no_dist=True)
        return state


class Fastckpt:
    """``fastckpt.save`` and ``fastckpt.load``, every byte verified, with one engine."""

    def __init__(self, engine: str) -> None:
        import fastckpt

        self.library, self.engine = fastckpt, engine

    def save(self, state: State, path: Path) -> dict[str, Any]:
        report = self.library.save(state, path, io=self.engine)
        return {
            "engine": report.engine,
            "fallback": report.fallback,
            "threads": report.threads,
            "phases": dict(report.phases),
            "blocks": dict(report.blocks),
        }

    def load(self, path: Path) -> State:
        loaded: State = self.library.load(path, io=self.engine, verify=True)
        return loaded


def fio(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write or read ``size`` bytes with fio; return its seconds and CPU seconds."""
    options = f"--name=raw --rw={kind} --bs={BLOCK} --iodepth={IN_FLIGHT} --direct=1 --ioengine=io_uring".split()
    options += ["--fallocate=native", "--end_fsync=1"] if kind == "write" else []
    command = ["fio", *options, f"--size={size}", f"--filename={path}", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"fio failed to {kind} {path}: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = job[kind]["runtime"] / 1000
    if job["error"] or job[kind]["io_bytes"] != size:
        raise OSError(f"fio moved {job[kind]['io_bytes']} of {size} bytes, error {job['error']}")
    return {"seconds": seconds, "cpu": seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100}


def direct_io(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write or read ``size`` bytes with O_DIRECT from Python threads; return its seconds and CPU seconds."""
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(IN_FLIGHT)]
    for buffer in buffers:
        buffer.write(os.urandom(BLOCK))
    flags = os.O_RDWR | os.O_CREAT if kind == "write" else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT, 0o666)

    def work(worker: int) -> None:
        for offset in range(worker * BLOCK, size, IN_FLIGHT * BLOCK):
            buffer = buffers[worker]
            moved = (
                os.pwrite(descriptor, buffer, offset) if kind == "write" else os.preadv(descriptor, [buffer], offset)
            )
            if moved != BLOCK:
                raise OSError(f"{kind} of {path} at {offset} moved {moved} of {BLOCK} bytes")

    try:
        if kind == "write":
            os.posix_fallocate(descriptor, 0, size)
        begin, cpu = time.perf_counter(), cpu_seconds()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(work, range(IN_FLIGHT)))
        if kind == "write":
            os.fsync(descriptor)
        return {"seconds": time.perf_counter() - begin, "cpu": cpu_seconds() - cpu}
    finally:
        os.close(descriptor)


class Raw:
    """The device itself. What it returns as ``seconds`` and ``cpu`` replaces what is measured from outside."""

    def __init__(self, transfer: Callable[[Path, int, str], dict[str, Any]]) -> None:
        self.transfer = transfer

    def save(self, state: State, path: Path) -> dict[str, Any]:
        path.mkdir()
        size = -(-total_bytes(state) // BLOCK) * BLOCK
        return {**self.transfer(path / "raw", size, "write"), "bytes": size}

    def load(self, path: Path) -> dict[str, Any]:
        size = (path / "raw").stat().st_size
        return {**self.transfer(path / "raw", size, "read"), "bytes": size}


def make_contender(name: str) -> Any:
    """Return the contender of this name."""
    if name.startswith("fastckpt"):
        _, _, engine = name.partition(":")
        return Fastckpt(engine or "auto")
    if name == "raw":
        return Raw(fio if shutil.which("fio") else direct_io)
    return {"torch": Torch, "safetensors": Safetensors, "dcp": Dcp}[name]()


TITLES = {
    "torch": "torch.save, torch.load",
    "safetensors": "safetensors",
    "dcp": "torch.distributed.checkpoint",
    "fastckpt": "**fastckpt**",
}


def title(name: str) -> str:
    """Return what the table calls a contender."""
    if name == "raw":
        return "raw device (fio, io_uring, direct)" if shutil.which("fio") else "raw device (Python threads, direct)"
    return TITLES.get(name) or f"fastckpt, io={name.partition(':')[2]}"


# -- measuring, inside a contender's process ---------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Return user and system seconds of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident(which: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {which}")


def reset_peak() -> bool:
    """Set the peak of the resident set back to what is resident now; False where the kernel forbids it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measure(call: Callable[[], Any], kept: Callable[[Any], int]) -> tuple[Sample, Any]:
    """Run ``call`` once; ``kept`` tells how many bytes of its result are not extra memory."""
    gc.collect()
    can_tell = reset_peak()
    before, cpu, begin = resident("VmRSS"), cpu_seconds(), time.perf_counter()
    result = call()
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    extra = max(0, resident("VmHWM") - before - kept(result)) if can_tell else None
    return Sample(seconds=seconds, cpu=cpu, extra=extra, bytes=0), result


def finish(sample: Sample, size: int, notes: dict[str, Any]) -> Sample:
    """Add what the contender itself reports; a tool that ran elsewhere brings its own times."""
    notes = dict(notes)
    own = notes.pop("seconds", None)
    return Sample(
        seconds=sample.seconds if own is None else own,
        cpu=notes.pop("cpu", sample.cpu),
        extra=sample.extra if own is None else None,
        bytes=notes.pop("bytes", size),
        notes=notes,
    )


def timed_save(contender: Any, state: State, path: Path) -> Sample:
    """Save and measure."""
    sample, notes = measure(lambda: contender.save(state, path), lambda _: 0)
    return finish(sample, total_bytes(state), notes)


def timed_load(contender: Any, path: Path, expected: Callable[[], State] | None) -> Sample:
    """Load, touch every page, and measure; then compare with what ``expected`` makes, outside the timing."""
    if isinstance(contender, Raw):
        sample, notes = measure(lambda: contender.load(path), lambda _: 0)
        return finish(sample, 0, notes)

    def load() -> State:
        loaded: State = contender.load(path)
        for tensor in loaded.values():
            if tensor.nbytes > mmap.PAGESIZE:
                as_bytes(tensor)[:: mmap.PAGESIZE].max()
        return loaded

    sample, loaded = measure(load, total_bytes)
    for name, tensor in (expected() if expected else {}).items():
        if tensor.dtype != loaded[name].dtype or (as_bytes(tensor) != as_bytes(loaded[name])).any():
            raise ValueError(f"{path}: {name} was not loaded as it was saved")
    return finish(sample, total_bytes(loaded), {})


def serve(connection: Connection, name: str, make_state: Callable[[int], State], argument: int) -> None:
    """Answer requests ``(operation, path, compare)`` of the parent until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        contender = make_contender(name)
        connection.send(None)
        while True:
            operation, path, compare = connection.recv()
            # The state lives only while it is needed, so that any number of contenders fit into memory.
            if operation == "save":
                connection.send(timed_save(contender, make_state(argument), path))
            else:
                expected = partial(make_state, argument) if compare else None
                connection.send(timed_load(contender, path, expected))
    except (EOFError, ConnectionError):
        pass
    except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
        connection.send(traceback.format_exc())


class Process:
    """A contender's process, seen from the parent."""

    def __init__(self, name: str, make_state: Callable[[int], State], argument: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, make_state, argument), daemon=True)
        self.process.start()
        theirs.close()
        self.receive()

    def receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(f"{self.name}: its process ended with status {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise SystemExit(f"{self.name} failed:\n{answer}")
        return answer

    def ask(self, operation: str, path: Path, *, compare: bool = False) -> Sample:
        self.connection.send((operation, path, compare))
        sample: Sample = self.receive()
        return sample

    def close(self) -> None:
        self.connection.close()
        # One that is in the middle of a call may finish it, or it would write into a directory that is being removed.
        self.process.join(timeout=30)
        self.process.kill()
        self.process.join()


# -- the rounds --------------------------------------------------------------------------------------------------------


def drop_caches(path: Path) -> str:
    """Make the files in ``path`` cold; return how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "dropped file by file with posix_fadvise (/proc/sys/vm/drop_caches is not writable here)"
    return "dropped through /proc/sys/vm/drop_caches"


def say(text: str) -> None:
    """Report progress where it does not mix with the result."""
    print(text, file=sys.stderr, flush=True)


def run_rounds(
    names: list[str], make_state: Callable[[int], State], argument: int, rounds: int, directory: Path
) -> tuple[dict[str, dict[str, list[Sample]]], str]:
    """Return every sample by contender and operation, and how caches were dropped."""
    samples: dict[str, dict[str, list[Sample]]] = {name: {"save": [], "load": []} for name in names}
    caches = ""
    processes: dict[str, Process] = {}
    try:
        for name in names:
            processes[name] = Process(name, make_state, argument)
        for number in range(rounds):
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            for name in order if number % 2 == 0 else reversed(order):
                path = directory / f"{name.replace(':', '-')}-{number}"
                # Nothing of an earlier turn may still be on its way to the disk.
                os.sync()
                samples[name]["save"].append(processes[name].ask("save", path))
                caches = drop_caches(path)
                samples[name]["load"].append(processes[name].ask("load", path, compare=number == 0))
                shutil.rmtree(path)
                done = ", ".join(f"{key} {value[-1].seconds:.3f} s" for key, value in samples[name].items())
                say(f"round {number + 1} of {rounds}: {name:<20} {done}")
    finally:
        for process in processes.values():
            process.close()
    return samples, caches


def summarise(samples: list[Sample]) -> dict[str, Any]:
    """Return the medians of one contender's samples of one operation."""
    size = samples[0].bytes
    seconds = statistics.median(sample.seconds for sample in samples)
    extras = [sample.extra for sample in samples if sample.extra is not None]
    return {
        "bytes": size,
        "seconds": seconds,
        "gigabytes_per_second": size / seconds / GB,
        "cpu_seconds_per_gigabyte": statistics.median(sample.cpu for sample in samples) / (size / GB),
        "extra_megabytes": max(extras) / MB if extras else None,
        "samples": [asdict(sample) for sample in samples],
    }


def spread(figures: dict[str, Any]) -> str:
    """Return the slowest and the fastest rate of all rounds."""
    rates = [sample["bytes"] / sample["seconds"] / GB for sample in figures["samples"]]
    return f"{min(rates):.2f} to {max(rates):.2f}"


def summarise_all(samples: dict[str, dict[str, list[Sample]]]) -> dict[str, dict[str, Any]]:
    """Return the medians of all contenders, with ratios to the raw device where it ran."""
    results = {name: {key: summarise(value) for key, value in pair.items()} for name, pair in samples.items()}
    for pair in results.values():
        for key, figures in pair.items():
            raw = results.get("raw", {}).get(key)
            figures["of_raw"] = figures["gigabytes_per_second"] / raw["gigabytes_per_second"] if raw else None
    return results


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A demand on the figures; ``measured`` is None where the run did not include what it needs."""

    what: str
    measured: float | None
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the figure is there and good enough."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3g}"
        sign = "at least" if self.at_least else "at most"
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {measured} ({sign} {self.limit:.3g})"


def size_bars(results: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return the bars on the large state."""

    def figure(name: str, operation: str, key: str) -> float | None:
        value: float | None = results.get(name, {}).get(operation, {}).get(key)
        return value

    def bar(what: str, operation: str, key: str, limit: float, *, at_least: bool) -> Bar:
        return Bar(what, figure("fastckpt", operation, key), limit, at_least)

    ours = figure("fastckpt", "save", "gigabytes_per_second")
    faster = [
        Bar(f"save, rate over {title(peer)}'s", ours / theirs if ours and theirs else None, 1.0, at_least=True)
        for peer in PEERS
        for theirs in [figure(peer, "save", "gigabytes_per_second")]
    ]
    return [
        bar("save, ratio to the raw device", "save", "of_raw", 0.80, at_least=True),
        bar("save, CPU seconds per GB", "save", "cpu_seconds_per_gigabyte", 0.35, at_least=False),
        bar("save, extra MB", "save", "extra_megabytes", 128 * 2**20 / MB, at_least=False),
        *faster,
        bar("cold load, ratio to the raw device", "load", "of_raw", 0.80, at_least=True),
    ]


def many_bars(results: dict[str, dict[str, Any]], count: int) -> list[Bar]:
    """Return the bars on many small tensors: no slower than safetensors."""
    return [
        Bar(
            f"{operation} of {count} tensors of 4 bytes, microseconds a tensor",
            results["fastckpt"][operation]["seconds"] / count * 1e6,
            results["safetensors"][operation]["seconds"] / count * 1e6,
            at_least=False,
        )
        for operation in ("save", "load")
    ]


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure for the table."""
    return "-" if value is None else f"{value:.{digits}f}"


def size_table(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the table of the large state, head first."""
    head = [""]
    for operation in ("save", "cold load"):
        head += [f"{operation}, s", "GB/s", "of raw", "CPU s/GB", "extra MB"]
    rows = [head]
    for name, pair in results.items():
        row = [title(name)]
        for figures in pair.values():
            row += [
                number(figures["seconds"], 3),
                number(figures["gigabytes_per_second"]),
                number(figures["of_raw"]),
                number(figures["cpu_seconds_per_gigabyte"]),
                number(figures["extra_megabytes"], 0),
            ]
        rows.append(row)
    return rows


def many_table(results: dict[str, dict[str, Any]], count: int) -> list[list[str]]:
    """Return the table of many small tensors, head first."""
    rows = [[f"{count} tensors of 4 bytes", "save, us a tensor", "cold load, us a tensor"]]
    for name, pair in results.items():
        rows.append([title(name), *(number(figures["seconds"] / count * 1e6, 1) for figures in pair.values())])
    return rows


def render(rows: list[list[str]], *, markdown: bool) -> str:
    """Return the table as Markdown or as aligned text."""
    if markdown:
        rule = ["---", *(["---:"] * (len(rows[0]) - 1))]
        return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])
    rows = [[cell.replace("**", "") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def version(package: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(directory: Path) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("fastckpt-io", "torch", "safetensors", "numpy")},
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "file_system": file_system(directory),
        "load_average": os.getloadavg()[0],
    }


def file_system(path: Path) -> str:
    """Return type and source of the file system that holds ``path``."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, place, kind = line.split()[:3]
        if path.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, f"{kind} on {source}")
    return best[1]


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2.0, help="GB of the large state, 0 for none (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="also N tensors of 4 bytes (default: 0, off)")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="peers, separated by commas, may be empty (default: %(default)s)"
    )
    parser.add_argument(
        "--engines", default="auto", help="fastckpt's engines: auto, uring, threads, buffered (default: auto)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(__file__).resolve().parent.parent / "target",
        help="where to write, on the storage to be measured (default: target/ of the repository)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and samples to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    options = parser.parse_args()
    options.peers = [peer for peer in options.peers.split(",") if peer]
    options.engines = options.engines.split(",")
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: unknown {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if unknown := set(options.engines) - {"auto", "uring", "threads", "buffered"}:
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.size < 0 or options.many < 0 or not (options.size or options.many):
        parser.error("--rounds must be at least 1, and --size or --many more than 0")
    return options


def main() -> int:
    """Run, print, and return the exit status."""
    options = parse_options()
    # A terminated run cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ours = ["fastckpt" if engine == "auto" else f"fastckpt:{engine}" for engine in options.engines]
    document: dict[str, Any] = {"rounds": options.rounds}
    tables: list[str] = []
    bars: list[Bar] = []

    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compare-", dir=options.dir) as name:
        directory = Path(name)
        document["machine"] = machine(directory)
        if options.size:
            names = ["raw", *options.peers, *ours]
            samples, document["caches"] = run_rounds(
                names, llama_state, int(options.size * GB), options.rounds, directory
            )
            document["results"] = summarise_all(samples)
            tables.append(render(size_table(document["results"]), markdown=options.markdown))
            bars += size_bars(document["results"])
        if options.many:
            names = ["safetensors", *ours]
            samples, document["caches"] = run_rounds(names, many_state, options.many, options.rounds, directory)
            document["many"] = summarise_all(samples)
            tables.append(render(many_table(document["many"], options.many), markdown=options.markdown))
            if "fastckpt" in ours:
                bars += many_bars(document["many"], options.many)

    document["bars"] = [{**asdict(bar), "met": bar.met} for bar in bars]
    print("\n\n".join(tables))
    print(f"\nMedians of {options.rounds} interleaved rounds, all saves durable; caches {document['caches']}.")
    if raw := document.get("results", {}).get("raw"):
        # A ratio above 1 is no wonder where the device itself was so uneven.
        save, load = (spread(raw[operation]) for operation in ("save", "load"))
        print(f"The raw device alone ranged over {save} GB/s writing and {load} GB/s reading.")
    about = document["machine"]
    if about["load_average"] > 0.5:
        print(f"The machine was busy when this began (load average {about['load_average']:.1f}): do not quote these.")
    print(f"{about['cores']} cores, {about['file_system']}, torch {about['packages']['torch']}, {about['system']}.")
    for bar in bars:
        say(str(bar))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and not all(bar.met for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
