"""Reports, logging, arguments, and saves over existing checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.types import SaveReport


def names_in(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_report(tmp_path, engine, caplog):
    with caplog.at_level(logging.INFO, "fastckpt"):
        io = fastckpt.IO(engine, threads=1)
        report = fastckpt.save({"w": torch.ones(1000), "n": [np.ones(5)]}, tmp_path / "c", io=io)
    assert isinstance(report, SaveReport)
    assert (report.bytes, report.tensors, report.shards, report.threads) == (4040, 2, 1, 1)
    assert report.engine == engine or report.fallback
    assert report.path == str(tmp_path / "c")
    assert list(report.phases) == ["plan", "write", "fsync", "commit"]
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert report.gigabytes_per_second == report.bytes / report.seconds / 1e9
    assert set(report.blocks) == {"zero-copy", "staged", "buffered"}
    assert str(report).startswith("saved 4.04 kB in ")
    assert str(report) in caplog.messages
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.bytes = 1


def test_load_and_verify_are_logged(tmp_path, caplog):
    fastckpt.save([torch.ones(3)], tmp_path / "c")
    with caplog.at_level(logging.INFO, "fastckpt"):
        fastckpt.load(tmp_path / "c")
        fastckpt.verify(tmp_path / "c")
    assert [m.split()[0] for m in caplog.messages if str(tmp_path) in m and m[0] in "lv"] == ["loaded", "verified"]


def test_silent_without_configured_logging(tmp_path):
    code = f"import fastckpt; fastckpt.save([1], {str(tmp_path / 'c')!r}, io='buffered')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout == done.stderr == b""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "^IO: threads must be None or an int from 1 to 256, not 0"),
        ({"threads": 257}, "threads must be"),
        ({"staging": "1MB"}, "^IO: staging must be at least 4 MiB, which is one block, not '1MB'"),
        ({"staging": "much"}, "^IO: staging must be a number of bytes"),
        ({"shard_size": 2**63}, "shard_size must be"),
        ({"threads": True}, "threads must be"),
        ({"threads": 1.5}, "threads must be"),
        ({"engine": "mmap"}, "^IO: engine must be one of auto, uring, threads, direct, buffered, not 'mmap'"),
        ({"engine": None}, "engine must be"),
        ({"shard_size": 0}, "^Files: shard_size must be a number of bytes from 1 to"),
        ({"shard_size": True}, "shard_size must be"),
        ({"shard_size": None}, "shard_size must be"),
        ({"shard_size": "5 parsecs"}, r"a string such as '500MB', '2GB' or '1GiB' \(units: B, kB, MB.*not '5 parsecs'"),
        ({"shard_size": "9EB"}, "shard_size must be"),
        ({"shard_size": "1e308PB"}, "shard_size must be"),
        ({"bandwidth_limit": 10**400}, "bandwidth_limit must be"),
        ({"bandwidth_limit": "2Gbit"}, "^IO: bandwidth_limit must be a number of bytes from 1 to"),
        ({"bandwidth_limit": "fast/s"}, "bandwidth_limit must be"),
    ],
)
def test_records_check_their_options(options, message):
    record = fastckpt.Files if "shard_size" in options else fastckpt.IO
    with pytest.raises(ValueError, match=message):
        record(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"io": "mmap"}, ValueError, "save: io must be one of auto, uring, threads, direct, buffered, not 'mmap'"),
        ({"io": None}, TypeError, "save: io must be the name of an engine or a fastckpt.IO, not None"),
        ({"files": 7}, TypeError, "save: files must be a dict of names and contents or a fastckpt.Files, not 7"),
        ({"registry": 7}, TypeError, "save: registry must be a fastckpt.Registry, not 7"),
        (
            {"threads": 1},
            TypeError,
            r"save: unexpected keyword argument 'threads': .* io=fastckpt.IO\(threads=\.\.\.\)",
        ),
    ],
)
def test_arguments_are_checked_first(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fastckpt.save([object()], tmp_path / "c", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shard_size", [20_000, "20000", "20kB", "20 KB", "0.02MB", 2e4])
def test_sizes_take_units(shard_size, tmp_path):
    state = {name: np.zeros(15_000, np.uint8) for name in "abc"}
    files, io = fastckpt.Files(shard_size=shard_size), fastckpt.IO(bandwidth_limit="2GB/s")
    fastckpt.save(state, tmp_path / "c", files=files, io=io)
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint.shards) == 3
        assert all(15_000 < size < 20_000 for size in checkpoint.shards.values())
        origin = checkpoint.origin
    assert origin.writer == f"fastckpt {fastckpt.__version__}"
    assert origin.engine in ("uring", "threads", "buffered")


def test_the_checkpoint_tells_what_was_left_out(tmp_path):
    """The checkpoint records the patterns of exclude=, with unsafe characters escaped and long patterns cut."""
    state = {"a": 1, "b\n": 2, "c": 3, "d": {"e" * 300: 4}}
    fastckpt.save(state, tmp_path / "c", exclude=["b\n", "[c]"])
    assert fastckpt.open(tmp_path / "c").origin.options == {"exclude": "b\\n, [c]"}
    fastckpt.save(state, tmp_path / "c", exclude=["c", "d." + "e" * 300])
    assert fastckpt.open(tmp_path / "c").origin.options == {"exclude": "c, d." + "e" * 242 + "..."}
    fastckpt.save({}, tmp_path / "c", exclude=[])
    assert fastckpt.open(tmp_path / "c").origin.options == {}


URLS = ["s3://bucket/step-1", "gs://bucket/x", "hdfs://node:8020/x", "abfss://a@b/x", "file:///tmp/x", "S3:/bucket/x"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("as_path", [str, pathlib.Path, os.fsencode])
def test_a_url_is_no_path(url, as_path, tmp_path, monkeypatch, capsys):
    """A save refuses a URL even if makedirs() has made a directory ``s3:``, where nobody looks for a checkpoint."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path(url).parent.mkdir(parents=True)
    given = as_path(url)
    for name, call in {
        "save": lambda: fastckpt.save({}, given),
        "save_async": lambda: fastckpt.save_async({}, given),
        "doctor": lambda: fastckpt.tools.doctor(given),
        "plan": lambda: fastckpt.tools.plan(checkpoint=given, gpus=8),
        "probe": lambda: fastckpt.tools.probe(given),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: '{url.partition(':')[0]}:/.*' is a URL"):
            call()
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    "command",
    [
        "import URL x",
        "export x URL",
        "plan --checkpoint URL",
        "bench URL",
        "doctor URL",
        "prune URL",
    ],
)
def test_a_url_is_no_path_on_the_command_line(command, tmp_path, monkeypatch, capsys):
    from harness import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert cli.main(command.replace("URL", "s3://bucket/x").split()) == 2
    assert "is a URL" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["step:1", "a/s3:/x", "./s3:/x", "x:/y", "1:/2"])
def test_a_path_with_a_colon_is_no_url(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    fastckpt.save({"n": 1}, path)
    assert fastckpt.load(tmp_path / path) == {"n": 1}


@pytest.mark.parametrize("path", [3, None, ["x"]])
def test_path_types(path):
    with pytest.raises(TypeError, match=r"save: path must be a str, bytes or os\.PathLike"):
        fastckpt.save(1, path)


def test_paths_of_every_sort(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("rel", b"raw", pathlib.Path("p"), str(tmp_path / "absolute"), "./sub/../dotted"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        report = fastckpt.save({"x": 1}, path)
        assert pathlib.Path(report.path).is_absolute()
        assert fastckpt.load(path) == {"x": 1}
    with pytest.raises(ValueError, match="path is empty"):
        fastckpt.save(1, "")
    with pytest.raises(ValueError, match="null"):
        fastckpt.save(1, "a\0b")


def test_options_are_keywords(tmp_path):
    with pytest.raises(TypeError, match="positional"):
        fastckpt.save(1, tmp_path / "c", False)
    with pytest.raises(TypeError, match="positional"):
        fastckpt.load(tmp_path / "c", None, False)


def test_overwrite(tmp_path, engine):
    path = tmp_path / "c"
    fastckpt.save({"v": 1, "w": torch.zeros(5000)}, path, io=engine)
    (path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError):
        fastckpt.save({"v": 2}, path, overwrite=False, io=engine)
    assert fastckpt.load(path)["v"] == 1
    fastckpt.save({"v": 3}, path, io=engine)
    assert fastckpt.load(path) == {"v": 3}
    assert names_in(tmp_path) == ["c"]
    assert (path / "config.json").read_text() == "{}"


def test_never_overwrites_what_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("mine")
    for name, inside in (("weights", "model.safetensors"), ("nested", "chapter/thesis.tex")):
        (tmp_path / name / inside).parent.mkdir(parents=True)
        (tmp_path / name / inside).write_text("mine")
    for name in ("file", "weights", "nested"):
        with pytest.raises(FileExistsError):
            fastckpt.save(1, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "weights" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "nested" / "chapter" / "thesis.tex").read_text() == "mine"
    assert names_in(tmp_path) == ["file", "nested", "weights"]


def test_shard_size(tmp_path):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(10)}
    report = fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=8000))
    assert report.shards == len(list((tmp_path / "c").glob("*.safetensors"))) >= 5
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert list(loaded) == list(state)


def test_progress(tmp_path, capsys):
    state = {"w": torch.ones(1 << 22)}
    fastckpt.save(state, tmp_path / "c", io=fastckpt.IO(progress=True))
    fastckpt.load(tmp_path / "c", io=fastckpt.IO(progress=True))
    fastckpt.verify(tmp_path / "c", io=fastckpt.IO(progress=True))
    shown = capsys.readouterr().err
    assert all(label in shown for label in ("save", "load", "verify"))
    assert "16.8M" in shown


def test_the_state_is_not_changed(tmp_path):
    w = torch.randn(4, 3, requires_grad=True)
    state = {"w": w, "t": w.t(), "n": np.arange(4)}
    version = w._version
    fastckpt.save(state, tmp_path / "c")
    assert list(state) == ["w", "t", "n"]
    assert w._version == version
    assert w.grad_fn is None
    assert state["t"].grad_fn is not None


# Files.


@pytest.mark.parametrize("save", [fastckpt.save, fastckpt.save_async])
def test_files_come_with_the_checkpoint(tmp_path, save):
    path, source = tmp_path / "c", tmp_path / "tokenizer.json"
    source.write_bytes(b"\0\xff" * 5000)
    binary = bytearray(b"\x80bin")
    files = {"config.json": '{"é": 1}', "raw.bin": binary, "view": memoryview(b"v"), source.name: source, "none": b""}
    pending = save({"w": np.ones(3)}, path, files=files, overwrite=False)
    if save is fastckpt.save_async:
        # The save writes the contents from the time of the call.
        binary[:] = b"late"
        source.unlink()
        pending.result()
    contents = {name: (path / name).read_bytes() for name in files}
    expected = {"config.json": '{"é": 1}'.encode(), "raw.bin": b"\x80bin", "view": b"v", "none": b""}
    assert contents == expected | {source.name: b"\0\xff" * 5000}
    assert fastckpt.verify(path).ok
    save({"w": np.zeros(3)}, path, files={"config.json": "new"})
    if save is fastckpt.save_async:
        fastckpt.background.drain()
    written = ["fastckpt.json", "model.safetensors", "model.safetensors.index.json"]
    assert names_in(path) == sorted([*files, *written])
    assert (path / "config.json").read_text() == "new"
    assert (path / "raw.bin").read_bytes() == b"\x80bin"
    assert fastckpt.load(path)["w"].tolist() == [0, 0, 0]
    with pytest.raises(OSError, match=r"holds `.*`, which is not part of the checkpoint"):
        fastckpt.remove(path)
    fastckpt.remove(path, force=True)
    assert not path.exists()


@pytest.mark.parametrize("save", [fastckpt.save, fastckpt.save_async])
def test_files_that_are_none(tmp_path, save):
    os.mkfifo(tmp_path / "fifo")
    wrong_names = ("", ".", "..", ".hidden", "a/b", "/a", "a\0", "n" * 256, "\udcff", "fastckpt.json")
    for name in (*wrong_names, "model.safetensors.index.json", "model.safetensors", "lora.safetensors"):
        with pytest.raises(ValueError, match=f"{save.__name__}: files: "):
            save(1, tmp_path / "c", files={name: "x"})
    for error, files in (
        (TypeError, ["config.json"]),
        (TypeError, {b"config.json": "x"}),
        (TypeError, {"config.json": 1}),
        (TypeError, {"config.json": {"dict": 1}}),
        (ValueError, {"config.json": "\ud800"}),
        (ValueError, {"config.json": tmp_path / "fifo"}),
        (FileNotFoundError, {"config.json": tmp_path / "missing"}),
        ((ValueError, IsADirectoryError), {"config.json": tmp_path}),
    ):
        with pytest.raises(error, match=r"config.json|files must be|missing"):
            save(1, tmp_path / "c", files=files)
    assert names_in(tmp_path) == ["fifo"]


def test_transformers_finds_the_files_that_came_with_a_save(tmp_path):
    transformers = pytest.importorskip("transformers", reason="NOT TESTED HERE: needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    state = {"model": model.state_dict(), "step": 3}
    fastckpt.save(state, tmp_path / "runs" / "step-3", files={"config.json": config.to_json_string()})
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "step-3")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in state["model"].items())
