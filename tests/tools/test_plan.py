"""``fastckpt.tools.plan`` and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastckpt
from harness import cli, needs

if TYPE_CHECKING:
    from pathlib import Path

try:
    import matplotlib as mpl
except ImportError as error:
    needs.missing(str(error))


HOUR = 3600.0


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    status, out, err = call(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "each"),
    [
        ({}, 14),
        ({"weights": "fp32"}, 12),
        ({"weights": "fp32", "master": "fp32"}, 16),
        ({"weights": "fp8"}, 13),
        ({"master": "none"}, 10),
        ({"master": "bf16", "optimizer": "sgd"}, 8),
        ({"optimizer": "none"}, 2),
        ({"optimizer": "adafactor"}, 6),
        ({"optimizer": "muon"}, 10),
        ({"optimizer": "adam8bit"}, 8.03125),
    ],
)
def test_bytes_a_parameter(said: dict[str, str], each: float) -> None:
    assert fastckpt.tools.plan(params="1B", gpus=8, **said).bytes == each * 10**9


def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fastckpt.save(
        {"w": np.zeros(100_000, np.float32), "m": np.ones(3)}, tmp_path / "c", files=fastckpt.Files(shard_size=100_000)
    )
    files = sum(file.stat().st_size for file in (tmp_path / "c").rglob("*.safetensors"))
    plan = fastckpt.tools.plan(checkpoint=tmp_path / "c", gpus=8)
    assert plan.bytes == files > 400_000
    assert plan.parameters is None
    assert call_json(capsys, "plan", "--checkpoint", tmp_path / "c", "--gpus", 8)["bytes"] == files
    # The smallest checkpoint has only a header.
    fastckpt.save({}, tmp_path / "empty")
    assert fastckpt.tools.plan(checkpoint=tmp_path / "empty", gpus=8).bytes > 0


def test_a_checkpoint_that_is_none_or_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "plan", "--checkpoint", tmp_path / "missing", "--gpus", 8)
    assert (status, out) == (2, "")
    assert str(tmp_path / "missing") in err
    fastckpt.save({"w": np.zeros(10)}, tmp_path / "c")
    (tmp_path / "c" / "fastckpt.json").write_text("{}")
    assert call(capsys, "plan", "--checkpoint", tmp_path / "c", "--gpus", 8)[0] == 1


# -- architectures -----------------------------------------------------------------------------------------------------


#: The required facts of a model.
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40_000,
}


def test_notes_of_a_config_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _, out, _ = call(capsys, "plan", "--config", tmp_path / "config.json", "--gpus", 8)
    assert "note: the config has no model_type" in out


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "give the number of GPUs"),
        ({"gpus": 100, "tp": 8}, "100 GPUs are not a multiple of tp 8 x pp 1 = 8"),
        ({"gpus": 64, "tp": 8, "pp": 2, "dp": 3}, "tp 8 x pp 2 x dp 3 = 48 is not the number of GPUs, 64"),
        ({"gpus": 0}, "gpus must be at least 1, not 0"),
        ({"gpus": -8}, "gpus must be at least 1, not -8"),
        ({"gpus": 8, "tp": 0}, "tp must be at least 1"),
        ({"gpus": 8, "ep": 3}, "expert parallelism 3 must divide data parallelism 8"),
        ({"gpus": 8, "ep": 2}, "requires the expert parameters"),
        ({"gpus": 8, "zero": 4}, "stage from 0 to 3, not 4"),
        ({"gpus": 8, "zero": -1}, "stage from 0 to 3"),
        ({"gpus": 8, "gpus_per_node": 0}, "gpus_per_node must be at least 1"),
        ({"gpus": 8, "size": "1TB"}, "give one of params, config, checkpoint, size, not params and size"),
        ({"gpus": 8, "expert_params": "2B"}, r"expert_params of at most params, 1,000,000,000"),
        ({"gpus": 8, "weights": "int4"}, "weights must be one of fp32"),
        ({"gpus": 8, "master": "fp64"}, "master must be one of"),
        ({"gpus": 8, "optimizer": "lbfgs"}, "optimizer must be one of adamw"),
        ({"gpus": 8, "goodput": 0.9, "overhead": 0.1}, "only one of goodput, overhead and interval"),
        ({"gpus": 8, "goodput": 1}, "goodput must be between 0 and 1"),
        ({"gpus": 8, "overhead": 0}, "overhead must be more than 0"),
        ({"gpus": 8, "interval": "-4h"}, "interval must be more than 0"),
        ({"gpus": 8, "mttf_gpu": 1, "mttf_cluster": 1}, "only one of mttf_gpu and mttf_cluster"),
        ({"gpus": 8, "mttf_gpu": "-1h"}, "mttf_gpu must be more than 0"),
        ({"gpus": 8, "tier": "enormous"}, "tier must be one of light, medium, high"),
        ({"gpus": 8, "tier": "light", "write": 3e9}, "either a tier or write"),
        ({"gpus": 8, "read": 3e9}, "give write or node_write beside read"),
        ({"gpus": 8, "write": 0}, "write must be more than 0"),
        ({"gpus": 8, "write": 2.5}, "write 2.5 would be bytes per second: give it a unit, as in '2.5GB/s'"),
        ({"gpus": 8, "write": "273"}, "write '273' would be bytes per second: give it a unit, as in '273GB/s'"),
        ({"gpus": 8, "write": 1e9, "stall": "1h"}, "stall 3600 s is longer than the checkpoint takes, 14 s"),
        ({"gpus": 8, "target_seconds": 0}, "target_seconds must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastckpt.tools.plan(params="1B", **said)


def test_wrong_types_are_refused() -> None:
    for said in ({"gpus": 8.0}, {"gpus": "8"}, {"gpus": 8, "tp": True}, {"gpus": 8, "gpus_per_node": 1.5}):
        with pytest.raises(TypeError, match="must be an integer, not"):
            fastckpt.tools.plan(params="1B", **said)
    with pytest.raises(ValueError, match=r"give one of params, config, checkpoint, size$"):
        fastckpt.tools.plan(gpus=8)
    with pytest.raises(ValueError, match="give expert_params only with params"):
        fastckpt.tools.plan(size=1, gpus=8, expert_params=1)


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_goodput_overhead_and_interval() -> None:
    job = {"size": "1TB", "gpus": 1000, "write": "100GB/s"}
    plan = fastckpt.tools.plan(**job)
    # Numbers without a unit are seconds.
    assert fastckpt.tools.plan(**job, mttf_cluster=50 * HOUR, interval=7200) == fastckpt.tools.plan(
        **job, mttf_gpu="50000h", interval="2h"
    )
    assert (plan.seconds, plan.stall, plan.mttf) == (10, 10, 50 * HOUR)
    assert plan.interval == plan.interval_best == pytest.approx(plan.interval_daly, rel=1e-4)
    assert fastckpt.tools.plan(**job, goodput=0.99).interval == pytest.approx(0.01 * plan.mttf)
    assert fastckpt.tools.plan(**job, overhead="1%").interval == pytest.approx(1000)
    assert fastckpt.tools.plan(**job, overhead="1%").overhead == pytest.approx(0.01)
    given = fastckpt.tools.plan(**job, interval="2h")
    assert given.interval == 2 * HOUR
    assert given.checkpoints_per_day == 12
    assert given.bytes_per_day == 12e12
    assert given.sustained == pytest.approx(1e12 / 7200)
    assert given.lost_seconds == pytest.approx(HOUR, rel=0.01)
    assert given.failures_per_day == pytest.approx(0.48)
    lost = given.lost_seconds + given.restore_seconds
    assert given.lost_gpu_hours_per_day == pytest.approx(1000 * 0.48 * lost / HOUR)
    # The goodput is the time without the losses by failures and checkpoints.
    assert given.goodput == pytest.approx((1 - lost / plan.mttf) * (1 - given.overhead), rel=1e-3)


def test_a_checkpoint_in_the_background_stops_training_for_less() -> None:
    job = {"size": "1TB", "gpus": 1000, "write": 1e9}
    plan, background = fastckpt.tools.plan(**job), fastckpt.tools.plan(**job, stall=2)
    assert (background.seconds, background.stall) == (1000, 2)
    assert background.interval < plan.interval
    assert background.goodput > plan.goodput
    assert background.lost_seconds == pytest.approx(background.interval / 2 + 998, rel=0.02)
    assert "training stands still for 2.00 s" in str(background)


def test_speeds() -> None:
    job: dict[str, Any] = {"size": "8TB", "tp": 8, "pp": 4, "dp": 2, "zero": 1}
    # 32 GPUs write weights and half of the optimizer's state, 32 the other half: 2 / 14 / 32 + 12 / 14 / 64.
    busiest = 8e12 * (2 / 14 / 32 + 12 / 14 / 64)
    plan = fastckpt.tools.plan(**job, write="100GB/s")
    assert (plan.write, plan.read, plan.seconds) == (100e9, 100e9, 80)
    assert plan.write_per_gpu == pytest.approx(busiest / 80)
    assert plan.restore_bytes == pytest.approx(8e12 * (2 * 2 / 14 + 12 / 14))
    assert fastckpt.tools.plan(**job, node_write="5GB/s").seconds == pytest.approx(8 * busiest / 5e9)
    assert fastckpt.tools.plan(**job, node_write="5GB/s", write="1GB/s").seconds == 8000
    assert fastckpt.tools.plan(**job, node_write="5GB/s", write="100GB/s").seconds == pytest.approx(8 * busiest / 5e9)
    both = fastckpt.tools.plan(**job, node_write="5GB/s", node_read="10GB/s", read="1e6GB/s")
    assert both.restore_seconds == pytest.approx(plan.restore_bytes / 8 / 10e9)
    assert fastckpt.tools.plan(**job, write="100GB/s", read="1GB/s").restore_seconds == pytest.approx(
        plan.restore_bytes / 1e9
    )
    asked = fastckpt.tools.plan(**job, target_seconds="2min")
    assert (asked.seconds, asked.write) == (120, pytest.approx(8e12 / 120))
    assert fastckpt.tools.plan(**job).speed == "tier light, since no speed is given"
    # The job is smaller than a node.
    small = fastckpt.tools.plan(size="1TB", gpus=2, node_write="5GB/s")
    assert small.seconds == small.restore_seconds == 200


# -- verdicts ----------------------------------------------------------------------------------------------------------


def verdicts(plan: fastckpt.tools.Plan) -> dict[str, bool]:
    return {verdict.tier: verdict.enough for verdict in plan.verdicts}


def test_verdicts_follow_what_was_asked_for() -> None:
    # 512 GPUs write 13.8 TB in 36, 18 and 9 s in the tiers.
    job = {"size": "13.8TB", "tp": 8, "pp": 64, "dp": 6}
    assert verdicts(fastckpt.tools.plan(**job)) == {"light": True, "medium": True, "high": True}
    found = verdicts(fastckpt.tools.plan(**job, target_seconds=20))
    assert found == {"light": False, "medium": True, "high": True}
    # Every 6 minutes, 36, 18 and 9 s are 10, 5 and 2.5 % of the time, and failures take 5 % more.
    found = verdicts(fastckpt.tools.plan(**job, goodput=0.9, mttf_cluster="1h"))
    assert found == {"light": False, "medium": False, "high": True}
    plan = fastckpt.tools.plan(**job, interval="30s", mttf_cluster="1000h", write="1000GB/s")
    assert plan.verdicts[0].reason == "a checkpoint starts every 30.0 s"
    assert not plan.verdicts[0].enough
    plan = fastckpt.tools.plan(**job, interval="10h", mttf_cluster="10h", write="1000GB/s")
    assert not any(verdicts(plan).values())
    assert "the interval is too long" in plan.verdicts[2].reason


def test_what_cannot_be_kept_up_is_noted() -> None:
    plan = fastckpt.tools.plan(size="13.8TB", gpus=512, write="100GB/s", interval="1min")
    assert plan.goodput == 0
    assert "takes 2.30 min, but one starts every 60.0 s: saves cannot keep up" in plan.notes[0].replace(
        "138 s", "2.30 min"
    )
    assert fastckpt.tools.plan(size="13.8TB", gpus=512, write="1000GB/s", interval="1min").notes == ()


# -- the library and the command ---------------------------------------------------------------------------------------


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "--params", "100B", "--expert-params", "60B", "--tp", "2", "--pp", "2", "--dp", "8"]
    plain = call_json(capsys, *base, "--write", "10GB/s")
    for option, value in (
        ("--weights", "fp8"),
        ("--master", "none"),
        ("--optimizer", "lion"),
        ("--ep", "4"),
        ("--zero", "1"),
        ("--gpus-per-node", "4"),
        ("--max-in-flight", "2"),
        ("--mttf-gpu", "1000h"),
        ("--mttf-cluster", "124min"),
        ("--restart", "5min"),
        ("--read", "20GB/s"),
        ("--node-write", "100MB/s"),
        ("--stall", "1s"),
        ("--goodput", "90%"),
        ("--overhead", "0.01"),
        ("--interval", "4h"),
        ("--target-seconds", "1"),
    ):
        assert call_json(capsys, *base, "--write", "10GB/s", option, value) != plain, option
    assert call_json(capsys, *base, "--node-write", "1GB/s", "--node-read", "2GB/s")["restore_seconds"] > 0
    assert call_json(capsys, *base, "--tier", "high")["speed"] == "tier high"
    assert call_json(capsys, *base[:-2], "--gpus", "32")["layout"]["dp"] == 8


def test_json_has_everything_that_the_library_has(capsys: pytest.CaptureFixture[str]) -> None:
    document = call_json(capsys, "plan", "--size", "13.8TB", "--tp", 8, "--pp", 64, "--dp", 6, "--write", "273GB/s")
    plan = fastckpt.tools.plan(size="13.8TB", tp=8, pp=64, dp=6, write="273GB/s")
    assert document == {"schema": "fastckpt/plan/1", **json.loads(json.dumps(plan.to_dict()))}
    assert document["writers"] == 512
    assert document["write_per_node"] == pytest.approx(4.27e9, abs=0.01e9)
    assert document["verdicts"][0]["tier"] == "light"


def test_the_table_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "plan", "--params", "405B", "--gpus", 16384, "--tp", 8, "--pp", 16, "--zero", 1)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 120
    assert out == f"{fastckpt.tools.plan(params='405B', gpus=16384, tp=8, pp=16, zero=1)}\n"


def test_memory_of_a_node_is_what_a_save_in_the_background_takes(tmp_path: Path) -> None:
    """The test measures a process, without the formula: memory stays after a save. For ranks, see tests/ranks."""
    code = """
import pathlib, re, sys, numpy, fastckpt
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10
fastckpt.save_async({"w": numpy.ones(9)}, sys.argv[1]).result()
state = {"w": numpy.ones(32 << 20), "b": numpy.ones(1000)}
before = anonymous()
report = fastckpt.save_async(state, sys.argv[1]).result()
print(report.staged, anonymous() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, check=True)
    staged, grown = map(int, done.stdout.split())
    plan = fastckpt.tools.plan(size=(32 << 23) + 8000, gpus=1)
    assert staged == plan.rank_bytes
    assert staged <= grown <= plan.memory_per_node
    assert plan.memory_per_node - plan.rank_bytes == fastckpt.tools.probe(tmp_path).staging


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ({"tp": 2, "dp": 8, "zero": 0}, 700e9),
        ({"tp": 2, "dp": 8, "zero": 1}, 100e9 + 600e9 / 8),
        ({"tp": 2, "dp": 8, "zero": 3}, 1400e9 / 16),
        ({"tp": 2, "dp": 8, "ep": 4, "zero": 0}, 7 * (40e9 + 60e9 / 4)),
    ],
)
def test_memory_of_a_node_by_layout(layout: dict[str, int], rank: float) -> None:
    known = {"params": "100B", "expert_params": "60B", **layout}
    plan = fastckpt.tools.plan(**known)
    assert plan.rank_bytes == pytest.approx(rank)
    assert plan.memory_per_node == pytest.approx(8 * (rank + (96 << 20)))
    twice = fastckpt.tools.plan(**known, max_in_flight=2, gpus_per_node=4)
    assert twice.memory_per_node == pytest.approx(4 * (2 * rank + (96 << 20)))
    assert " of a node for saves in the background: 4 x (2 x " in str(twice)
    few = fastckpt.tools.plan(**known, gpus_per_node=64)
    assert few.memory_per_node == pytest.approx(16 * (rank + (96 << 20)))


def test_errors_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        ([], "give one of --params"),
        (["--params", "1B"], "give the number of GPUs"),
        (["--params", "1B", "--gpus", "eight"], "invalid int value"),
        (["--config", tmp_path / "c.json", "--gpus", 8], f"cannot plan {tmp_path}/c.json: No such file"),
        (["--params", "1B", "--gpus", 8, "--plot", tmp_path / "x.svg"], "--plot draws a sweep"),
        (
            ["--params", "1B", "--gpus", 8, "--sweep", "gpus=1,2"],
            "--sweep gpus: leave out --gpus, which the sweep replaces",
        ),
    ):
        status, out, err = call(capsys, "plan", *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err


def test_help_has_examples_that_work(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    page = call(capsys, "plan", "--help")[1]
    examples = [line.split() for line in page.splitlines()]
    commands = [words[1:] for words in examples if words[:1] == ["fastckpt"]]
    assert len(commands) == 2
    for words in commands:
        assert call(capsys, *words)[0] == 0, words


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_same_as_its_plans(capsys: pytest.CaptureFixture[str]) -> None:
    document = call_json(capsys, "plan", "--params", "405B", "--tp", 8, "--sweep", "gpus=1000,2000")
    assert document["sweep"] == "gpus"
    assert document["values"] == ["1000", "2000"]
    plans = [fastckpt.tools.plan(params="405B", tp=8, gpus=gpus).to_dict() for gpus in (1000, 2000)]
    assert document["plans"] == json.loads(json.dumps(plans))
    for swept in ("write=100GB/s,200GB/s", "goodput=0.9,0.95", "interval=1h,2h", "mttf-gpu=1000h,2000h", "stall=1,2"):
        status, out, _ = call(capsys, "plan", "--params", "405B", "--gpus", 1000, "--sweep", swept)
        assert status == 0
        assert len(out.splitlines()) == 3
        assert len(set(out.splitlines())) == 3
    job = ["plan", "--params", 1, "--sweep"]
    assert "'1.5' is not a whole number" in call(capsys, *job, "gpus=1.5")[2]
    assert call_json(capsys, *job, "gpus=1e3")["plans"][0]["layout"]["dp"] == 1000


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    assert mpl.__version__
    for index, swept in enumerate(("gpus=1000:64000:x2", "interval=1h,2h")):
        file = tmp_path / f"{index}.{suffix}"
        known = ["--gpus", 1000] if index else []
        assert call(capsys, "plan", "--params", "405B", *known, "--sweep", swept, "--plot", file)[0] == 0
        start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
        assert file.read_bytes().startswith(start)


def test_a_picture_that_cannot_be_drawn_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["plan", "--params", "1B", "--sweep", "gpus=1,2", "--plot"]
    status, _, err = call(capsys, *job, tmp_path / "x.docx")
    assert status == 2
    assert "suffix must be one of" in err
    assert "svg" in err
    assert "create it" in call(capsys, *job, tmp_path / "missing" / "x.svg")[2]
    # An entry of None in sys.modules makes the import fail, as without an installed matplotlib.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    status, _, err = call(capsys, *job, tmp_path / "x.svg")
    assert status == 2
    assert "pip install matplotlib" in err
    assert call(capsys, *job[:-1])[0] == 0
