"""``fastckpt plan --simulate``: its output, its options, and its refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from harness import cli

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# -- the command -------------------------------------------------------------------------------------------------------

COST = ["plan", "--simulate", "--cost", "50s", "--gpus", 24_000, "--mttf-cluster", "124min"]


def test_the_command_takes_a_job_as_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    import fastckpt

    job = ["--params", "405B", "--gpus", 16384, "--tp", 8, "--pp", 16, "--node-write", "4GB/s", "--restart", "5min"]
    more = ["--stall", "2s", "--duration", "30d", "--runs", 20, "--seed", 7, "--weibull", 2]
    _, out, _ = call(capsys, "plan", "--simulate", *job, *more, "--json")
    document = json.loads(out)
    plan = fastckpt.tools.plan(params="405B", gpus=16384, tp=8, pp=16, node_write="4GB/s", restart="5min", stall=2)
    assert document["cost"] == 2
    assert document["lag"] == pytest.approx(plan.seconds - 2)
    assert document["restart"] == pytest.approx(300 + plan.restore_seconds)
    assert [document[name] for name in ("duration", "runs", "seed", "shape")] == [30 * 86400, 20, 7, 2]
    _, out, _ = call(capsys, "plan", "--simulate", *job, *more)
    assert "Weibull lives of shape 2" in out
    assert "later" in out


def test_a_simulation_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, *COST, "--runs", 10, "--plot", tmp_path / "s.svg")[0] == 0
    assert (tmp_path / "s.svg").read_text().startswith("<?xml")


def test_errors_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["plan", "--simulate", "--ranks", 2], "unrecognized arguments: --ranks"),
        (["plan", "--simulate"], "give one of --params"),
        (["plan", "--simulate", "--cost", "50s"], "--cost needs --gpus"),
        ([*COST, "--params", "1B", "--node-write", "4GB/s"], "leave out --node-write, --params"),
        (["plan", "--simulate", "--cost", "0", "--gpus", 8], "cost must be more than 0"),
        (["plan", "--simulate", "--cost", "1", "--gpus", 0], "--gpus must be at least 1, not 0"),
        ([*COST, "--plot", tmp_path / "x.docx"], "suffix must be one of"),
    ):
        status, out, err = call(capsys, *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err


def test_its_options_are_not_those_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "--params", "1B", "--gpus", 8]
    for more, message in (
        (["--duration", "30d"], "plan: --duration requires --simulate"),
        (["--from", "node.json"], "plan: --from requires --simulate"),
        (["--simulate", "--goodput", "95%"], "plan: --goodput cannot be combined with --simulate"),
        (["--simulate", "--sweep", "gpus=1,2"], "plan: --sweep cannot be combined with --simulate"),
    ):
        status, out, err = call(capsys, *job, *more)
        assert (status, out) == (2, ""), more
        assert message in err
