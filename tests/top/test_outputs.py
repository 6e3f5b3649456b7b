"""The monitor without a screen: --once, --json, --check, lines, --prometheus, --record, --replay, debug."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fastckpt_top
import pytest
from by_hand import GB, Rank, joined, look
from fastckpt_top import prometheus, text
from fastckpt_top.jsonout import JsonWriter, Ticks, dumps
from fastckpt_top.lines import LineWriter, check, table
from fastckpt_top.model import Model
from fastckpt_top.record import Recorder
from fastckpt_top.replay import Recording, Replay, ReplayError
from fastckpt_top.segment import Phase
from looking import demo
from producer import Image
from prometheus_client.parser import text_string_to_metric_families

SCHEMA = json.loads((Path(fastckpt_top.__file__).parent / "schema.json").read_text())
TYPES = {
    "number": (int, float),
    "integer": int,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def wrong(value, schema, where="$"):
    """Violations of the schema in `value`; supports the part of JSON Schema that is in use, and no unknown keys."""
    if "anyOf" in schema:
        tries = [wrong(value, one, where) for one in schema["anyOf"]]
        return min(tries, key=len)
    if "const" in schema:
        return [] if value == schema["const"] else [f"{where}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} not in {schema['enum']}"]
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, TYPES[one]) and (one == "boolean" or not isinstance(value, bool)) for one in allowed):
        return [f"{where}: {value!r} is no {allowed}"]
    found = []
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{where}: {key} is missing" for key in schema["required"] if key not in value]
        found += [f"{where}: {key} is not in the schema" for key in value if key not in schema["properties"]]
        for key, inner in schema["properties"].items():
            if key in value:
                found += wrong(value[key], inner, f"{where}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += wrong(item, schema["items"], f"{where}[{index}]")
    return found


def test_the_schema_can_say_no():
    assert wrong({"schema": "fastckpt-top/1", "kind": "tick"}, SCHEMA)
    assert wrong([], SCHEMA)


def watched(seconds=9.0, begin=0.0, model=None):
    clock, session = demo(begin, model)
    for tick in range(int(seconds * 2)):
        clock.now = 100.0 + tick / 2
        session.tick()
    return clock, session


def test_every_line_of_a_recording_is_in_the_schema(recording):
    lines = gzip.decompress(recording.read_bytes()).decode("ascii").splitlines()
    assert len(lines) > 70
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["header"] + ["tick"] * (len(lines) - 1)
    for line in lines:
        assert wrong(json.loads(line), SCHEMA) == []


def test_json_of_a_real_process_is_in_the_schema_and_counts_up(producer, top):
    child = producer("--rate", 1e9, "--threads", 3)
    result = top("--json", "--count", 4, "-d", "0.3", "--target", "2GB/s")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["header", "tick", "tick", "tick", "tick"]
    for line in lines:
        assert wrong(line, SCHEMA) == []
    ticks = lines[1:]
    done = [tick["ops"][0]["done"] for tick in ticks]
    assert done == sorted(done)
    assert done[0] < done[-1]
    rank = ticks[-1]["ranks"][0]
    assert (rank["pid"], rank["op"], rank["state"], rank["engine"], rank["alive"]) == (
        child.pid,
        "save",
        "write",
        "uring",
        True,
    )
    assert sum(thread["bytes"] for thread in rank["threads"]) == rank["done"]
    assert rank["Bps"] == pytest.approx(1e9, rel=0.2)
    assert ticks[-1]["ops"][0]["target_Bps"] == 2e9
    assert ticks[-1]["ops"][0]["avg_Bps"] == pytest.approx(1e9, rel=0.2)


def test_whatever_a_rank_does_its_line_is_in_the_schema():
    """Mutants: a rank that waits for another, or is in a phase of a later layout, has a state that the schema lacks."""
    for phase in (None, *Phase, 99):
        for waits_for in (None, 1):
            rank = joined(Rank(0) if phase is None else Rank(0).op(GB, phase), 0, waits_for=waits_for)
            assert wrong(json.loads(dumps(Ticks().next(look(Model(), 1.0, rank)))), SCHEMA) == []


def test_once(producer, top):
    producer("--rank", 3, "--rate", 5e8)
    result = top("--once", "-d", "0.3")
    assert (result.returncode, result.stderr) == (0, "")
    assert "save step-7" in result.stdout
    assert "WRITE" in result.stdout
    assert "\x1b" not in result.stdout
    result = top("--once", "--json", "-d", "0.3")
    (line,) = result.stdout.splitlines()
    assert wrong(json.loads(line), SCHEMA) == []
    assert json.loads(line)["ranks"][0]["rank"] == 3
    assert json.loads(top("--once", "--json", "--rank", 4).stdout)["ranks"] == []


def test_nothing_found_is_3(top):
    for args in (["--once"], ["--check"], ["debug", "ls"], ["--once", "--json"]):
        assert top(*args).returncode == 3, args
    assert "no fastckpt process in" in top("--once").stderr


def test_check_judges_the_running_operation(producer, top):
    producer("--rate", 1e9)
    time.sleep(0.5)
    # The target is far below the rate: the producer counts only while it gets the CPU.
    good = top("--check", "--target", "0.1GB/s")
    assert (good.returncode, good.stdout[:3]) == (0, "ok:")
    bad = top("--check", "--target", "high")
    assert (bad.returncode, bad.stdout.split(":")[0]) == (1, "BELOW TARGET")
    assert top("--check", "20", "--target", "high").returncode == 0
    assert top("--check", env={"FASTCKPT_TOP_TARGET": "save=9GB/s"}).returncode == 1


def test_check_judges_the_last_operation_of_a_job_that_is_gone(place, top):
    made = Image(rank=0, gpu=0)
    now = time.monotonic_ns()
    made.operation(
        phase=6,
        t_start_mono_ns=now - 5 * 10**9,
        t_end_mono_ns=now - 10**9,
        bytes_total=8 * 10**9,
        bytes_durable=8 * 10**9,
    )
    made.write(place)
    assert top("--check", "--target", "2GB/s").returncode == 0
    assert top("--check", "--target", "2.1GB/s").returncode == 1
    made.operation(phase=7, t_start_mono_ns=now - 5 * 10**9, t_end_mono_ns=now - 10**9, error=28)
    made.write(place)
    failed = top("--check", "1")
    assert (failed.returncode, failed.stdout.split(":")[0]) == (1, "FAILED")


def test_check_of_the_demonstration_and_of_a_recording(top, recording):
    assert top("--demo", "--check", "50").returncode == 0
    assert top("--demo", "--check", "150").returncode == 1
    assert top("--replay", recording, "--check", "50", "--target", "high").returncode == 0
    assert top("--replay", recording, "--check", "150", "--target", "high").returncode == 1


def test_usage_is_2(top):
    for args in (
        ["--target", "fast"],
        ["--interval", "0"],
        ["--gpus", "0"],
        ["--gpus", "1.5"],
        ["--nonsense"],
        ["--speed", "x"],
    ):
        assert top(*args).returncode == 2, args
    result = top("--once", env={"FASTCKPT_TOP_TARGET": "fast"})
    assert result.returncode == 2
    assert "give light, medium, high" in result.stderr


def test_line_mode_where_there_is_no_terminal(producer, top):
    producer("--rate", 1e9)
    result = top("--count", 3, "-d", "0.3")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any("started" in line for line in lines)
    assert sum("save step-7: " in line and "write" in line for line in lines) == 3
    assert "\x1b" not in result.stdout


def test_line_mode_under_a_dumb_terminal_and_a_narrow_locale(producer, top):
    producer()
    result = top("--count", 2, "-d", "0.2", env={"TERM": "dumb", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()


def test_a_reader_that_goes_away_ends_it_quietly(producer, place):
    producer()
    for args in ("", "--json", "--once"):
        command = f"{sys.executable} -m fastckpt_top {args} -d 0.1 | head -1"
        env = os.environ | {"FASTCKPT_TOP_DIR": str(place)}
        result = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=env,
            stdin=subprocess.DEVNULL,
        )
        assert (result.returncode, result.stderr, len(result.stdout.splitlines())) == (0, "", 1), args


def test_lines_are_quiet_while_idle_and_tell_events():
    out = io.StringIO()
    clock, session = demo(0.0)
    session.sinks.append(LineWriter(out, text.ASCII))
    for tick in range(80):
        clock.now = 100.0 + tick / 2
        session.tick()
    lines = out.getvalue().splitlines()
    assert out.getvalue().isascii()
    assert sum("idle:" in line for line in lines) == 1
    assert sum("save step-11800: " in line for line in lines) > 40
    assert any("! rank 6 runs threads, not io_uring (EPERM: " in line for line in lines)
    assert any("- save step-11800 done: 319.2 GB in 24.4 s" in line for line in lines)
    assert any(line.endswith(", last: rank 6") for line in lines)


def test_line_mode_gives_the_sentence_when_it_says_something_else():
    out = io.StringIO()
    clock, session = demo(0.0)
    session.sinks.append(LineWriter(out))
    said = []
    for tick in range(80):
        clock.now = 100.0 + tick / 2
        session.tick()
        if (sentence := session.model.jobs[0].sentence) is not None:
            said.append(sentence.words[0])
    lines = [line[11:] for line in out.getvalue().splitlines() if " ! " in line or " - " in line]
    given = [line for line in lines if line in said]
    shapes = [shape for shape, _ in itertools.groupby(re.sub("[0-9.]+", "", words) for words in said)]
    assert [re.sub("[0-9.]+", "", words) for words in given] == shapes
    assert any(words.startswith("Held back by rank 6: ") for words in given)
    assert given[-1].startswith("step-11800 stayed below its target: ")
    assert 2 < len(given) < len(said) / 3


def test_the_table_and_the_sentence():
    _, session = watched()
    shown = table(session.model)
    assert "last: rank 6" in shown
    assert "threads+D!" in shown
    assert table(session.model, text.ASCII).isascii()
    assert check(session.model, 50)[0] is True
    assert check(session.model, 100)[0] is False
    assert check(Model(), 100)[0] is None


def test_prometheus_is_what_its_parser_reads(tmp_path):
    _, session = watched(9.0)
    path = tmp_path / "fastckpt.prom"
    writer = prometheus.Prometheus(str(path))
    writer.write(session.model)
    page = path.read_text()
    assert page.endswith("\n")
    assert list(tmp_path.iterdir()) == [path], "the file is written under another name and renamed"
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert not any(sample.timestamp for family in families.values() for sample in family.samples)
    names = [
        (sample.name, tuple(sorted(sample.labels.items()))) for family in families.values() for sample in family.samples
    ]
    assert len(names) == len(set(names)), "each series occurs once"
    assert all(family.type != "unknown" for family in families.values())
    total = sum(sample.value for sample in families["fastckpt_io_bytes"].samples)
    assert total == sum(t.bytes_ever for proc in session.model.snapshot.procs for _, t in proc.threads)
    phases = [
        s.labels["phase"] for s in families["fastckpt_operation_phase"].samples if s.value and s.labels["rank"] == "0"
    ]
    assert phases == ["write"]
    (fallback,) = families["fastckpt_engine_fallback"].samples
    assert (fallback.labels["rank"], fallback.labels["engine"], fallback.labels["errno"]) == ("6", "threads", "EPERM")
    buckets = [
        s
        for s in families["fastckpt_io_latency_seconds"].samples
        if s.name.endswith("_bucket") and s.labels["rank"] == "0"
    ]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert (buckets[0].labels["le"], buckets[-1].labels["le"]) == ("6.4e-05", "+Inf")
    targets = {s.labels["op"]: s.value for s in families["fastckpt_target_bytes_per_second"].samples}
    assert targets == {"save": 24e9, "load": 32e9}


def test_prometheus_counters_never_go_back():
    clock, session = demo(0.0)
    last = {}
    for tick in range(140):
        clock.now = 100.0 + tick
        session.tick()
        for family in text_string_to_metric_families(prometheus.render(session.model)):
            if family.type != "counter":
                continue
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                assert sample.value >= last.get(key, 0), key
                last[key] = sample.value


def test_labels_of_prometheus_are_escaped(place):
    from fastckpt_top.feed import ShmFeed

    Image(version='a"b\\c').write(place)
    shm, model = ShmFeed([str(place)]), Model()
    model.update(shm.poll())
    shm.close()
    families = {f.name: f for f in text_string_to_metric_families(prometheus.render(model))}
    assert "fastckpt_build_info" not in families, "a dead process without a rank has no build info"
    Image(version='a"b\\c', rank=0).write(place)
    shm = ShmFeed([str(place)])
    model.update(shm.poll())
    shm.close()
    families = {f.name: f for f in text_string_to_metric_families(prometheus.render(model))}
    assert families["fastckpt_build_info"].samples[0].labels["version"] == 'a"b\\c'


def test_the_prometheus_option_writes_beside_any_mode(producer, top, tmp_path):
    producer()
    path = tmp_path / "x.prom"
    assert top("--once", "-d", "0.1", "--prometheus", path).returncode == 0
    assert 'fastckpt_process_up{job_name="producer",rank="0"' in path.read_text()
    assert top("--once", "--prometheus", tmp_path / "none" / "x.prom").returncode == 4


def test_a_recording_made_by_the_command_replays(producer, top, tmp_path):
    producer("--rate", 2e9, "--total", 3e9)
    for name in ("r.jsonl", "r.jsonl.gz"):
        path = tmp_path / name
        assert top("--count", 4, "-d", "0.2", "--record", path).returncode == 0
        assert path.stat().st_mode & 0o777 == 0o600
        shown = top("--replay", path, "--json")
        assert shown.returncode == 0
        for line in shown.stdout.splitlines():
            assert wrong(json.loads(line), SCHEMA) == []
        assert "save step-7" in top("--replay", path, "--once").stdout


def test_a_recording_holds_no_idle_ticks_but_one_in_ten_seconds(tmp_path):
    path = tmp_path / "r.jsonl"
    clock, session = demo(24.0)
    session.sinks.append(Recorder(str(path)))
    for tick in range(26):
        clock.now = 100.0 + tick
        session.tick()
    session.close()
    times = [round(t - 100.0) for t in Recording(str(path)).times]
    assert times[:5] == [0, 1, 11, 15, 16], "the end, idle, 10 s later, the tick before the load, the load"


def test_a_replay_that_cannot_be_read_is_4(top, tmp_path, recording):
    lines = gzip.decompress(recording.read_bytes()).decode().splitlines(keepends=True)
    broken = {
        "missing": None,
        "empty": "",
        "not json": "hello\n",
        "not ours": "{}\n",
        "other": lines[0].replace("fastckpt-top/1", "fastckpt-top/2") + lines[1],
        "no ticks": lines[0],
        "back in time": lines[0] + lines[3] + lines[2],
        "nan": lines[0] + '{"schema":"fastckpt-top/1","kind":"tick","mono":NaN}\n' * 2,
        "deep": lines[0] + "[" * 100_000 + "\n",
    }
    for name, content in broken.items():
        path = tmp_path / f"{name}.jsonl"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ReplayError, match=str(path)):
            Replay(str(path)).end()
    result = top("--replay", tmp_path / "other.jsonl", "--once")
    assert result.returncode == 4
    assert "recorded as fastckpt-top/2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_recorder_that_was_killed_leaves_a_file_that_plays(tmp_path, recording):
    data = recording.read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    assert len(Recording(str(path))) > 10
    plain = tmp_path / "cut.jsonl"
    plain.write_text(gzip.decompress(data).decode()[:-100])
    assert len(Recording(str(plain))) == len(Recording(str(recording))) - 1


def test_the_segments_themselves(producer, top, place):
    child = producer("--rank", 2)
    Image(pid=77, rank=5).write(place, "77-1.seg")
    (place / "1-1.seg").write_bytes(b"nonsense")
    listed = top("debug", "ls")
    assert listed.returncode == 0
    assert f"pid {child.pid}, uid {os.geteuid()}, rank 2" in listed.stdout
    assert "pid 77, uid" in listed.stdout
    assert "dead, touched" in listed.stdout
    assert "1-1.seg: too short" in listed.stdout
    lines = [json.loads(line) for line in top("debug", "ls", "--json").stdout.splitlines()]
    assert {line.get("pid"): line.get("alive") for line in lines} == {child.pid: True, 77: False, None: None}
    assert top("--rank", 5, "debug", "ls").stdout.count("pid ") == 1
    elsewhere = top("--dir", place / "none", "debug", "ls")
    assert elsewhere.returncode == 3
    assert elsewhere.stderr.startswith(f"no segment in {place}/none\n")
    assert top("debug", "ls", "--dir", place / "none").returncode == 3
    assert top("debug").returncode == 2
    assert top("--onc", "--demo").returncode == 2  # no abbreviated options here, either
    assert top("debug", "clean", "--ye").returncode == 2
    assert top("--once", "--demo", "-d", "200ms").returncode == 0
    assert "`2min`: expected 0.1 to 60 seconds" in top("--once", "--demo", "-d", "2min").stderr
    assert "`2x`: expected 0.1 to 60 seconds" in top("--once", "--demo", "-d", "2x").stderr
    dumped = json.loads(top("debug", "dump", place / "77-1.seg").stdout)
    assert dumped["header"]["rank"] == 5
    assert top("debug", "dump", place / "1-1.seg").returncode == 4
    assert top("debug", "dump", place / "none").returncode == 4
    assert top("debug", "clean", "--yes").stdout == ""
    os.utime(place / "77-1.seg", (1, 1))
    assert top("debug", "clean").stdout == f"would remove {place}/77-1.seg\n"
    assert top("debug", "clean", "--yes").stdout == f"removed {place}/77-1.seg\n"
    assert (place / f"{next(place.glob(f'{child.pid}-*')).name}").exists()


def test_names_of_files_do_not_steer_the_terminal(top, place):
    """In a shared directory, any user may create files with any name."""
    nasty = "77-\x1b]0;title\x07\x9b2J\u202e.seg"
    Image(pid=77, rank=5).write(place, nasty)
    (place / f"1{nasty}").write_bytes(b"nonsense")

    def printable(done):
        told = done.stdout + done.stderr
        assert told
        return all(char.isprintable() or char == "\n" for char in told)

    assert printable(top("debug", "ls"))
    assert printable(top("debug", "ls", "--json"))
    assert printable(top("debug", "dump", place / f"1{nasty}"))
    assert printable(top("debug", "dump", place / f"2{nasty}"))
    assert printable(top("--replay", place / f"1{nasty}"))
    os.utime(place / nasty, (1, 1))
    swept = top("debug", "clean", "--yes")
    assert printable(swept)
    assert "removed" in swept.stdout


def test_version_and_help(top):
    assert top("--version").stdout == "fastckpt-top 0.1.0, segment layout 1.x\n"
    assert "exit codes" in top("--help").stdout


def test_a_json_writer_gives_what_is_new_once():
    out = io.StringIO()
    clock, session = demo(0.0)
    session.sinks.append(JsonWriter(out, header=False))
    for tick in range(6):
        clock.now = 100.0 + tick
        session.tick()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [bool(line["procs"][0]["header"]) for line in lines] == [True] + [False] * 5
    assert [bool(line["procs"][0]["history"]) for line in lines] == [True] + [False] * 5
    assert sum(len(line["events"]) for line in lines) == 2
