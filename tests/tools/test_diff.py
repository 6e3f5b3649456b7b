"""``fastckpt diff``: it reports exactly the changes between two checkpoints."""

from __future__ import annotations

import dataclasses
import enum
import json
import math

import numpy as np
import pytest

import fastckpt
from harness import cli, needs
from harness.states import trained as training

try:
    import torch
except ImportError as error:
    needs.missing(str(error))


def test_equal_checkpoints(compared):
    state = {"w": torch.randn(8, 8), "nan": torch.tensor([math.nan, -0.0]), "empty": np.zeros((0, 3)), "step": 7}
    document, screen = compared(state, state | {"nan": torch.tensor([math.nan, 0.0])})
    assert document["equal"] == 3
    assert (document["changed"], document["values"]) == ([], [])
    assert screen == "3 tensors equal, 0 changed, 0 removed, 0 added\n"


def test_integers_keep_their_last_bit(compared):
    document, _ = compared({"n": torch.tensor([2**62])}, {"n": torch.tensor([2**62 + 1])})
    assert document["changed"][0]["max_abs"] == 1.0


def test_the_most_changed_comes_first(compared):
    document, _ = compared(
        {"a": np.full(4, 1.0), "b": np.full(4, 1.0), "c": np.zeros(4), "d": np.ones(4), "e": np.ones(4)},
        {"a": np.full(4, 1.1), "b": np.full(4, 3.0), "c": np.ones(4), "d": np.full(4, math.nan), "e": np.ones(5)},
    )
    assert [one["name"] for one in document["changed"]] == ["d", "e", "c", "b", "a"]
    nan, shape, zero = document["changed"][:3]
    assert (nan["max_abs"], nan["elements"]) == ("nan", 4)
    assert (shape["shape"], shape["elements"], shape["max_abs"]) == ("[4] -> [5]", None, None)
    assert zero["relative"] == "inf"


def test_what_came_and_went_and_values(compared):
    before = {"model": {"w": np.ones(2), "old": np.ones(2)}, "lr": 0.1, "betas": (0.9, 0.95), "gone": 1}
    after = {"model": {"w": np.ones(2), "new": np.ones(2)}, "lr": 0.05, "betas": (0.9, 0.99), "came": "x"}
    document, screen = compared(before, after)
    assert document["removed"] == ["model.old"]
    assert document["added"] == ["model.new"]
    assert {one["name"]: (one["before"], one["after"]) for one in document["values"]} == {
        "lr": ("0.1", "0.05"),
        "betas.1": ("0.95", "0.99"),
        "gone": ("1", "-"),
        "came": ("-", "'x'"),
    }
    assert "removed: model.old\nadded: model.new\nlr: 0.1 -> 0.05\n" in screen


def test_what_is_not_a_number(compared):
    days = np.array(["2026-01-01", "2026-01-02"], "datetime64[D]")
    state = {
        "days": days,
        "blob": bytes(9999),
        "packed": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    other = {"days": days + np.array([0, 1]), "blob": bytes(9998) + b"\1"}
    other["packed"] = torch.tensor([0, 9, 0, 9], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    document, _ = compared(state, other)
    found = {one["name"]: (one["elements"], one["max_abs"]) for one in document["changed"]}
    assert found == {"days": (1, None), "blob": (1, 1.0), "packed": (2, 9.0)}


def test_a_dtype_that_changed_is_told_even_where_no_value_did(compared):
    document, _ = compared({"w": torch.ones(3)}, {"w": torch.ones(3, dtype=torch.bfloat16)})
    (found,) = document["changed"]
    assert (found["dtype"], found["elements"], found["max_abs"]) == ("float32 -> bfloat16", 0, 0.0)


def test_long_lists_are_cut_on_the_screen_alone(compared):
    document, screen = compared({str(i): np.zeros(1) for i in range(50)}, {str(i): np.ones(1) for i in range(50)})
    assert len(document["changed"]) == 50
    assert "and 10 more; --json lists all" in screen


def test_damage_is_found(tmp_path, capsys):
    for name in ("a", "b"):
        fastckpt.save({"w": np.arange(1 << 16)}, tmp_path / name)
    with (tmp_path / "b" / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "checksum" in capsys.readouterr().err


@dataclasses.dataclass
class Schedule:
    name: str
    lr: float
    steps: list[int]


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


def test_a_changed_dataclass_shows_what_changed(compared):
    before = {"s": Schedule("a name that is longer than the sixty columns that a value has", 0.1, [1, 2])}
    after = {"s": dataclasses.replace(before["s"], lr=0.2, steps=[1, 3])}
    document, screen = compared(before, after)
    shown = {one["name"]: (one["before"], one["after"]) for one in document["values"]}
    assert shown == {"s.lr": ("0.1", "0.2"), "s.steps.1": ("2", "3")}
    assert "s.lr: 0.1 -> 0.2\n" in screen


def test_long_values_show_where_they_differ(compared):
    document, _ = compared({"text": "x" * 500 + "a"}, {"text": "x" * 500 + "b"})
    (found,) = document["values"]
    assert (found["before"][-2:], found["after"][-2:]) == ("a'", "b'")
    assert len(found["before"]) < 70


def test_equal_values_that_are_made_of_others(compared):
    def state():
        return {
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "expanded": torch.ones(1, 3).expand(4, 3),
            "by": {Phase.WARM: 1, (1, Phase.COLD): 2, 1: 3},
            "set": {Phase.WARM, Phase.COLD, "x"},
            "slice": slice(1, Phase.WARM),
            "s": Schedule("n", math.nan, [1]),
        }

    # Tensors come before the others, so that the others have different numbers and places in the second checkpoint.
    document, _ = compared(state(), {"more": torch.ones(7), **state()})
    assert document["values"] == []
    assert document["changed"] == []
    other = state() | {"coo": torch.eye(4).to_sparse(), "set": {Phase.WARM, "x"}, "by": {Phase.WARM: 2, 1: 3}}
    document, _ = compared(state(), other)
    names = [one["name"] for one in document["values"]]
    assert names[0] == "coo"
    assert names[-1] == "set"
    assert len(names) == 4


def test_deep_states_are_compared_to_their_end(compared):
    def nested(leaf, levels=1500):
        for _ in range(levels):
            leaf = [leaf]
        return leaf

    document, _ = compared({"x": nested(1), "gone": nested(1)}, {"x": nested(2)})
    by_name = {one["name"]: (one["before"], one["after"]) for one in document["values"]}
    assert by_name["x" + ".0" * 1500] == ("1", "2")
    assert by_name["gone"][1] == "-"
    assert len(by_name) == 2


@pytest.mark.parametrize(
    ("other", "status"), [({"w": [1.0], "n": 1}, 0), ({"w": [2.0], "n": 1}, 1), ({"w": [1.0], "n": 2}, 1)]
)
def test_the_exit_code_tells_of_differences_if_it_is_asked_to(tmp_path, other, status):
    fastckpt.save({"w": np.ones(1), "n": 1}, tmp_path / "a")
    fastckpt.save({"w": np.array(other["w"]), "n": other["n"]}, tmp_path / "b")
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(command) == 0
    assert cli.main([*command, "--exit-code"]) == status


@pytest.mark.parametrize(
    ("after", "shares", "still"),
    [
        (training(2), {"model": 0.25, "optimizer": 1.0}, []),
        (training(2, weights=False), {"model": 0.0, "optimizer": 1.0}, ["model"]),
        (training(2, moments=False), {"model": 0.25, "optimizer": 0.0}, ["optimizer"]),
        (training(2, weights=False, moments=False), {"model": 0.0, "optimizer": 0.0}, ["model", "optimizer"]),
    ],
)
def test_a_pipeline_expects_a_change_of_what_is_trained(tmp_path, capsys, after, shares, still):
    """Step counters and random generators change even without training."""
    fastckpt.save(training(0), tmp_path / "a")
    fastckpt.save(after, tmp_path / "b")
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main([*command, "--expect-change", "--json"]) == int(bool(still))
    assert json.loads(capsys.readouterr().out)["shares"] == shares
    assert cli.main([*command, "--expect-change"]) == int(bool(still))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("has changed")] == [
        f"no tensor of the {one} has changed" for one in still
    ]
    assert cli.main([*command, "--expect-change", "--exit-code"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_where_nothing_is_trained_any_tensor_is_a_change(tmp_path, capsys):
    for name, state in {"a": [np.zeros(2, int), 1], "b": [np.zeros(2, int), 2], "c": [np.ones(2, int), 2]}.items():
        fastckpt.save({"x": state}, tmp_path / name)
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--expect-change"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no tensor of the state has changed"
    assert cli.main(["diff", str(tmp_path / "b"), str(tmp_path / "c"), "--expect-change"]) == 0
