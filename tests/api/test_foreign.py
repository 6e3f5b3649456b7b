"""Every way to save refuses another program's directory, and the error names the program."""

from __future__ import annotations

import contextlib
import io
import re

import numpy as np
import pytest

import fastckpt
from harness import cli, s3

STATE = {"w": np.arange(4.0)}

#: By the program that the error names (before the comma): files and directories (with a slash) of its checkpoint.
DIRECTORIES = {
    "torch.distributed.checkpoint": [".metadata", "__0_0.distcp"],
    "DeepSpeed": ["global_step7/", "latest", "zero_to_fp32.py"],
    "DeepSpeed, one step": ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "Orbax": ["_CHECKPOINT_METADATA", "_METADATA", "d/", "manifest.ocdbt", "ocdbt.process_0/"],
    "transformers": ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
    "safetensors": ["params.json", "consolidated.safetensors", "README.md"],
    "safetensors, of diffusers": ["config.json", "diffusion_pytorch_model.safetensors"],
}

#: Directories of other programs whose files have names that fastckpt uses.
NAMESAKES = {
    "a model": ["config.json", "model.safetensors"],
    "a model in parts": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    "an adapter": ["adapter_config.json", "adapter_model.safetensors", "README.md"],
}


def lay(path, kind):
    path.mkdir(parents=True)
    for name in {**DIRECTORIES, **NAMESAKES}[kind]:
        if name.endswith("/"):
            (path / name).mkdir()
            (path / name / "inside").write_text("theirs")
        else:
            (path / name).write_text("theirs")
    return path


def contents(path):
    return {file.relative_to(path): file.read_text() for file in path.rglob("*") if file.is_file()}


def by_manager(path, *, async_save):
    with fastckpt.Manager(path.parent, name="step-{step}", async_save=async_save, ranks="alone") as manager:
        manager.save(int(path.name.removeprefix("step-")), STATE)


def by_copy(path):
    fastckpt.save(STATE, path.parent / "source")
    fastckpt.copy(path.parent / "source", path, overwrite=True)


def by_convert(path):
    source = path.parent / "source.safetensors"
    pytest.importorskip("safetensors.numpy").save_file(STATE, source)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert cli.main(["import", "--overwrite", str(source), str(path)]) != 0
    raise FileExistsError(said.getvalue())


def by_dcp(path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from fastckpt.dcp import Writer

    dcp.save(dict(STATE), storage_writer=Writer(path))


def by_ranks(save):
    def ways(path):
        dist = pytest.importorskip("torch.distributed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            save(path)
        finally:
            dist.destroy_process_group()

    return ways


WAYS = {
    "save": lambda path: fastckpt.save(STATE, path),
    "save_async": lambda path: fastckpt.save_async(STATE, path).result(),
    "distributed.save": by_ranks(lambda path: fastckpt.distributed.save(STATE, path)),
    "distributed.save_async": by_ranks(lambda path: fastckpt.distributed.save_async(STATE, path).result()),
    "Manager": lambda path: by_manager(path, async_save=False),
    "Manager in the background": lambda path: by_manager(path, async_save=True),
    "copy": by_copy,
    "convert": by_convert,
    "dcp": by_ranks(by_dcp),
}


def refusal(error):
    """The text of an error and its causes, because some ways to save wrap the error."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def who_wrote(kind):
    """The end of the refusal for a kind of directory."""
    if kind in NAMESAKES:
        return "and is not a checkpoint of fastckpt: choose another name"
    return f"which {kind.partition(',')[0]} wrote: choose another name"


@pytest.mark.parametrize("kind", [*DIRECTORIES, *NAMESAKES])
@pytest.mark.parametrize("way", WAYS)
def test_no_save_goes_into_a_directory_of_another_program(tmp_path, way, kind):
    path = lay(tmp_path / "run" / "step-7", kind)
    before = contents(path)
    # torch raises an error that is not an Exception.
    with pytest.raises(BaseException, match=r"(?s).") as raised:
        WAYS[way](path)
    text = refusal(raised.value)
    assert re.search(who_wrote(kind), text), text
    assert re.search("it holds `[^`]+`", text), text
    assert contents(path) == before
    assert not list(path.parent.glob(".step-7*"))


def test_files_that_are_no_checkpoint_are_taken_along(tmp_path):
    """A save may write weights into a directory that has the model's configuration and tokenizer."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "trainer_state.json", "optimizer.pt"):
        (path / name).write_text("theirs")
    fastckpt.save(STATE, path)
    assert (path / "config.json").read_text() == "theirs"
    # Beside a checkpoint of fastckpt, such files are ordinary files.
    (path / "pytorch_model.bin").write_text("exported")
    fastckpt.save(STATE, path)
    assert (path / "pytorch_model.bin").read_text() == "exported"


def test_what_is_expected_to_be_a_checkpoint_is_named(tmp_path):
    for kind in ("DeepSpeed", "Orbax", "transformers"):
        path = lay(tmp_path / kind, kind)
        with pytest.raises(fastckpt.exceptions.NotACheckpointError, match=f"which {kind} wrote"):
            fastckpt.load(path)


def test_a_copy_to_an_object_store_is_refused_alike(tmp_path):
    pytest.importorskip("obstore")
    fastckpt.save(STATE, tmp_path / "source")
    for number, (kind, names) in enumerate({**DIRECTORIES, **NAMESAKES}.items()):
        url = f"memory://foreign-{tmp_path.name}-{number}/step-7"
        objects = s3.objects(url)
        for name in names:
            objects.write(name + "inside" * name.endswith("/"), iter([b"theirs"]), 6, None)
        there = objects.sizes()
        with pytest.raises(FileExistsError, match=who_wrote(kind)):
            fastckpt.copy(tmp_path / "source", url, overwrite=True)
        assert objects.sizes() == there
        objects.remove(there)


def test_the_command_says_it_too(tmp_path, capsys):
    fastckpt.save(STATE, tmp_path / "source")
    path = lay(tmp_path / "there", "Orbax")
    assert cli.main(["copy", str(tmp_path / "source"), str(path), "--overwrite"]) != 0
    assert "which Orbax wrote" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["torch.distributed.checkpoint", "DeepSpeed, one step", "Orbax", "transformers"])
def test_a_checkpoint_that_another_program_put_beside_ours_is_told(tmp_path, capsys, kind):
    fastckpt.save(STATE, tmp_path / "c")
    assert fastckpt.verify(tmp_path / "c").warnings == ()
    for name in DIRECTORIES[kind]:
        if not name.endswith("/"):
            (tmp_path / "c" / name).write_text("theirs")
    report = fastckpt.verify(tmp_path / "c")
    (text,) = report.warnings
    assert report.ok
    assert f"which {kind.partition(',')[0]} wrote" in text
    assert cli.main(["verify", str(tmp_path / "c")]) == 0
    assert text in capsys.readouterr().out


def test_the_metadata_that_a_writer_of_ours_leaves_is_no_other_checkpoint(tmp_path):
    fastckpt.save(STATE, tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"ours")
    assert fastckpt.verify(tmp_path / "c").warnings == ()
