"""The results that benchmarks compute from samples: medians, ratios, bars, tables, plots. Nothing is timed here."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from bench import bars, measure, options, process, report, states, summary
from bench.contenders import Spec, environment, knows
from bench.rounds import Outcome, Rounds
from harness import needs

GB = 10**9


def sample(seconds, **others):
    return measure.Sample(**{"bytes": 2 * GB, "seconds": seconds, "user": 0.2, "system": 0.1, **others})


def outcome(**contenders):
    """Return an outcome with one sample per operation, given in seconds."""
    samples = {
        name.replace("_", ":"): {operation: [sample(seconds)] for operation, seconds in operations.items()}
        for name, operations in contenders.items()
    }
    return Outcome(samples=samples)


def test_figures_are_medians_and_memory_the_largest():
    figures = summary.summarise(
        [
            sample(1.0, extra=5_000_000, minor=1000, copied=2 * GB),
            sample(4.0, extra=90_000_000, minor=3000, copied=2 * GB),
            sample(2.0, extra=None, minor=2000, copied=4 * GB),
        ]
    )
    assert figures["seconds"] == 2.0
    assert figures["gigabytes_per_second"] == 1.0
    assert figures["cpu_seconds_per_gigabyte"] == pytest.approx(0.15)
    assert figures["user_seconds_per_gigabyte"] == pytest.approx(0.1)
    assert figures["minor_faults_per_gigabyte"] == 1000
    assert figures["major_faults_per_gigabyte"] is None
    assert figures["extra_megabytes"] == 90
    assert figures["copied_per_byte"] == 1.0
    assert [one["cpu"] for one in figures["samples"]] == pytest.approx([0.3] * 3)


def test_a_rate_is_held_against_the_raw_device_of_its_kind():
    results = summary.summarise_all(
        outcome(raw={"save": 1.0, "load": 2.0}, fastckpt={"save": 2.0, "load": 2.0, "into": 1.0, "hot": 1.0})
    )
    ours = results["fastckpt"]
    assert ours["save"]["of_raw"] == 0.5
    assert ours["load"]["of_raw"] == 1.0
    assert ours["into"]["of_raw"] == 2.0
    # A hot load has no device to compare with.
    assert ours["hot"]["of_raw"] is None


def test_ratios_of_what_was_not_measured_are_none():
    assert summary.ratio(None, 1.0) is None
    assert summary.ratio(1.0, None) is None
    assert summary.ratio(1.0, 0.0) is None
    assert summary.ratio(1.0, 4.0) == 0.25
    assert summary.median([None, None]) is None
    assert summary.median([None, 3.0, 1.0]) == 2.0


def test_counted_calls_are_per_gigabyte():
    one = outcome(fastckpt={"save": 1.0})
    one.calls = {"fastckpt": {"save": 3000}}
    assert summary.summarise_all(one)["fastckpt"]["save"]["system_calls_per_gigabyte"] == 1500


def test_bars_know_at_least_from_at_most_and_missing_from_met():
    assert bars.Bar("x", 1.0, 1.0, at_least=True).met
    assert not bars.Bar("x", 0.9, 1.0, at_least=True).met
    assert bars.Bar("x", 0.9, 1.0, at_least=False).met
    assert not bars.Bar("x", 1.1, 1.0, at_least=False).met
    missing = bars.Bar("x", None, 1.0, at_least=False)
    assert not missing.met
    assert str(missing).startswith("MISSED  x: not measured")
    assert missing.document() == {"what": "x", "measured": None, "limit": 1.0, "at_least": False, "met": False}


def test_the_best_peer_is_neither_the_device_nor_ourselves():
    results = summary.summarise_all(
        outcome(
            raw={"save": 0.1}, torch={"save": 4.0}, safetensors={"save": 2.0}, fastckpt={"save": 1.0},
            fastckpt_uring={"save": 0.5},
        )
    )  # fmt: skip
    assert bars.best_peer(results, "save") == ("safetensors", 1.0)
    assert bars.best_peer(results, "load") is None
    bar = bars.over_best(results, "save", 1.5)
    assert (bar.measured, bar.met) == (2.0, True)
    assert "safetensors" in bar.what
    assert not bars.over_best(results, "load", 1.0).met


def everything(ours, peer):
    """Return results of a run with all figures of the bars, from the seconds of fastckpt and of the best peer."""
    every = {"save": ours, "load": ours, "into": ours, "hot": ours}
    results = summary.summarise_all(
        outcome(
            raw={"save": 1.0, "load": 1.0}, torch=dict.fromkeys(every, peer), safetensors={"hot": peer / 10},
            fastckpt=every, fastckpt_uring=every, fastckpt_threads=every, **{"fastckpt_mmap-only": {"hot": ours / 10}},
        )
    )  # fmt: skip
    results["safetensors"]["hot"]["mapped_share"] = 1.0
    return results


def test_all_bars_of_a_disk():
    results = everything(1.0, 2.0)
    for name, cpu in (("fastckpt:slabs", 0.29), ("fastckpt:zero-copy", 0.17)):
        results[name] = {"save": {"cpu_seconds_per_gigabyte": cpu}}
    results["fastckpt.torch"] = {"save": {"of_raw": 0.85}}
    results["fastckpt"]["save"]["extra_megabytes"] = 134.0
    results["fastckpt"]["load"]["extra_megabytes"] = results["fastckpt"]["into"]["extra_megabytes"] = 67.0
    assert [str(bar) for bar in bars.disk_bars(results) if not bar.met] == []
    results["fastckpt:slabs"]["save"]["cpu_seconds_per_gigabyte"] = 0.31
    results["fastckpt.torch"]["save"]["of_raw"] = 0.84
    results["fastckpt"]["into"]["extra_megabytes"] = 68.0
    missed = [bar.what for bar in bars.disk_bars(results) if not bar.met]
    assert missed == [
        "save: ratio to the raw device, fastckpt.torch",
        "save: CPU seconds per GB, fastckpt:slabs",
        "into: memory over the state, MB",
    ]


def test_hot_loads_are_held_against_those_that_do_the_same():
    results = everything(1.0, 2.0)
    # A contender that maps is ten times as fast as one that copies.
    results["safetensors"]["hot"]["gigabytes_per_second"] *= 2.5
    copied, mapped = bars.hot_bars(results)
    assert (mapped.met, copied.met) == (False, True)
    assert mapped.what == "hot: fastckpt:mmap-only, times the best peer (that map; safetensors)"
    assert copied.what == "hot: times the best peer (that copy; torch)"
    del results["fastckpt:mmap-only"]
    assert bars.hot_bars(results)[1].measured is None
    # Without a peer that maps, the mapped load is not compared.
    del results["safetensors"]
    assert len(bars.hot_bars(results)) == 1


def test_what_the_device_itself_reaches_stands_beside_a_bar():
    assert "(torch; the raw device 5)" in bars.over_best(everything(1.7, 5.0), "save", 3.0).what


def test_into_is_held_against_the_best_cold_load():
    results = everything(1.0, 1.2)
    results["torch"]["into"]["gigabytes_per_second"] = 100.0
    (bar,) = [bar for bar in bars.disk_bars(results) if bar.what.startswith("into: times")]
    assert bar.measured == pytest.approx(1.2)
    assert not bar.met


def test_bars_of_a_loop_device_and_of_small_states():
    assert all(bar.met for bar in bars.loop_bars(everything(1.6, 4.9)))
    assert not any(bar.met for bar in bars.loop_bars(everything(1.7, 5.0)))
    results = summary.summarise_all(
        outcome(safetensors={"save": 1.0, "load": 1.0}, fastckpt={"save": 1.0, "load": 1.1})
    )
    assert [bar.met for bar in bars.no_slower(results, ("save", "load"), "1 MB")] == [True, False]


def test_a_tool_that_ran_elsewhere_brings_its_own_accounts():
    notes = {"seconds": 3.0, "user": 1.0, "system": 0.5, "bytes": GB, "engine": "x"}
    taken = measure.with_notes(sample(9.0, extra=7), 1, notes)
    assert (taken.seconds, taken.cpu, taken.bytes, taken.extra, taken.minor) == (3.0, 1.5, GB, None, None)
    assert taken.notes == {"engine": "x"}
    kept = measure.with_notes(sample(9.0, extra=7), 5, {"copied": 4})
    assert (kept.seconds, kept.bytes, kept.extra, kept.copied) == (9.0, 5, 7, 4)


def test_accounts_of_a_call():
    taken, result = measure.measure(lambda: np.ones(50_000_000, np.uint8), lambda array: array.nbytes)
    assert result.nbytes == 50_000_000
    assert taken.seconds > 0
    # The faults are at least ten, however the machine treats huge pages.
    assert taken.minor >= 10
    assert taken.extra is None or taken.extra < 25_000_000
    _, kept = measure.measure(lambda: None)
    assert kept is None


def test_tables_are_rectangular_and_dashes_stand_for_what_is_not_known():
    results = summary.summarise_all(
        outcome(raw={"save": 1.0}, torch={"save": 2.0, "load": 2.0}, fastckpt={"save": 1.0})
    )
    for table in (
        report.speed_table(results),
        report.cost_table(results, "save"),
        report.many_table(results, 1000, "1000 tensors"),
    ):
        assert len({len(row) for row in table}) == 1
        text = report.render(table, markdown=False)
        assert "**" not in text
        markdown = report.render(table, markdown=True).splitlines()
        assert len(markdown) == len(table) + 1
        assert markdown[1].startswith("| --- | ---:")
    assert report.speed_table(results)[1][-3:] == ["-", "-", "-"]
    assert report.many_table(results, 1000, "")[2] == ["torch.save, torch.load", "2000.0", "2000.0"]


def test_who_did_not_run_is_named_once_a_reason():
    lines = report.not_run({"a": "no module", "b": "no GPU", "c": "no module"}, str.upper)
    assert lines == ["Not run: A; C: no module.", "Not run: B: no GPU."]


def test_a_mapping_is_called_one():
    results = summary.summarise_all(outcome(safetensors={"load": 1.0}, torch={"load": 1.0}))
    results["safetensors"]["load"]["mapped_share"] = 0.99
    section = {"results": results, "not_run": {}, "notes": {"torch": "slow today"}}
    slow, mapped = report.remarks(section)
    assert slow == "torch.save, torch.load: slow today."
    assert mapped.startswith("Mapped: safetensors:")


def test_the_document_is_json():
    one = summary.section(states.Workload("model", 10**6), outcome(raw={"save": 1.0}, fastckpt={"save": 1.0}))
    assert json.loads(json.dumps(one)) == one
    assert one["workload"] == "model: 1 MB"
    assert one["results"]["fastckpt"]["save"]["samples"][0]["seconds"] == 1.0


def test_pictures(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        needs.missing("matplotlib")
    from bench import plot

    results = everything(1.0, 2.0)
    results["torch"]["hot"]["mapped_share"] = 1.0
    del results["torch"]["save"]
    first, again = tmp_path / "one.svg", tmp_path / "two.svg"
    plot.bars(first, results, "a heading")
    plot.bars(again, results, "a heading")
    text = first.read_text()
    assert text == again.read_text()
    for word in ("a heading", "GB/s, more is better", "CPU s per GB", "fastckpt, io=threads", "none", "peers"):
        assert word in text
    assert first.stat().st_size < 200 * 1024
    lines = {("fastckpt", "save"): [(1, 2.0), (1000, 3.0)], ("torch", "save"): [(1, 1.0)]}
    panels = [{"title": "t", "x": "MB", "y": "s", "log": log, "lines": lines} for log in ("", "x", "xy")]
    plot.curves(tmp_path / "curves.png", panels, "a heading")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "one", "huge", "numpy", "optimizer", "small"])
def test_states_are_the_same_each_time_and_of_their_size(kind):
    if importlib.util.find_spec("torch") is None:
        needs.missing("torch")
    workload = states.Workload(kind, 4 * 10**6)
    state = workload.make()
    assert 0.5 < states.total_bytes(state) / workload.size < 1.5
    assert states.differences(state, workload.make()) is None
    blank = workload.make_blank()
    assert states.differences(state, blank) is not None
    states.fill(blank, state)
    assert states.differences(state, blank) is None
    states.touch(blank, write=True)
    assert states.differences(state, blank) is None
    # If half of the bits are set, all bytes are filled with random bits.
    largest = max((states.as_bytes(leaf) for _, leaf in states.leaves(state) if hasattr(leaf, "nbytes")), key=len)
    assert 0.49 < np.unpackbits(largest).mean() < 0.51


def test_differences_are_found():
    state = {"a": np.arange(4), "n": {"lr": 0.1, "l": [1, 2]}}
    assert states.differences(state, {"a": np.arange(4), "n": {"lr": 0.1, "l": [1, 2]}}) is None
    assert states.differences(state, {"a": np.arange(4), "n": {"lr": 0.2, "l": [1, 2]}}) == "n.lr differs"
    assert states.differences(state, {"a": np.arange(1, 5), "n": {"lr": 0.1, "l": [1, 2]}}) == "a differs"
    assert states.differences({"a": np.zeros(4, np.int64)}, {"a": np.zeros(4)}) == "a differs"
    assert "in one of them only" in states.differences(state, {"a": np.arange(4)})
    assert states.largest(state) == 32


# -- running -----------------------------------------------------------------------------------------------------------


def test_every_round_visits_everybody_from_another_start_and_the_other_way_round(tmp_path):
    rounds = Rounds([], states.Workload("model", 1), tmp_path)
    rounds.processes = dict.fromkeys("abc")
    orders = ["".join(rounds.order(number)) for number in range(4)]
    assert orders == ["abc", "acb", "cab", "cba"]


def test_options_are_read(capsys):
    assert [options.amount(text) for text in ("4096", "64K", "4M", "1g", "2e9")] == [
        4096, 65536, 4 << 20, 1 << 30, 2 * 10**9,
    ]  # fmt: skip
    assert options.several(int)("1,2,") == [1, 2]
    parser = options.parser("x")
    assert parser.parse_args([]).rounds == 5
    with pytest.raises(SystemExit):
        parser.parse_args(["--rounds", "0"])
    assert "less than 1" in capsys.readouterr().err


def test_environment_is_put_back(monkeypatch):
    import os
    import sys

    monkeypatch.setenv("FASTCKPT_A", "1")
    monkeypatch.delenv("FASTCKPT_B", raising=False)
    path = sys.path.copy()
    with environment(Spec("fastckpt", environment={"FASTCKPT_A": "2", "FASTCKPT_B": "3"}, site="/there")):
        assert (os.environ["FASTCKPT_A"], os.environ["FASTCKPT_B"]) == ("2", "3")
        assert sys.path == ["/there", *path]
    with environment(Spec("fastckpt")):
        assert sys.path == path
    assert os.environ["FASTCKPT_A"] == "1"
    assert "FASTCKPT_B" not in os.environ
    assert sys.path == path


def test_a_variable_that_the_build_ignores_is_refused():
    assert not knows("FASTCKPT_NO_SUCH_VARIABLE")
    with pytest.raises(ValueError, match="does not read FASTCKPT_NO_SUCH_VARIABLE"):
        process.made(
            Spec("fastckpt:x", environment={"FASTCKPT_NO_SUCH_VARIABLE": "1"}), states.Workload("model", 10**6)
        )


def test_total_of_strace():
    lines = [
        "strace: Process 7 attached",
        "  calls syscall",
        "------ -----",
        "     9 read",
        "     3 write",
        "    12 total",
    ]
    text = "\n".join(lines) + "\n"
    assert process.total_calls(text) == 12
    with pytest.raises(ValueError, match="no total"):
        process.total_calls("strace: gone")


def test_who_is_left_is_nobody(tmp_path):
    assert Rounds([], states.Workload("model", 1), tmp_path).order(3) == []
