"""scripts/gpu survives failures of its parts, and lists the parts that ran; benchmarks/gpu.py runs without a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils import backend_registration

import fastckpt
from bench import gpu_bars
from bench.measure import Sample
from bench.rounds import Outcome
from harness import needs, programs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu"
BENCHMARK = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    """Return the script as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_command", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_command", loader))
    sys.modules["gpu_command"] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    yield module
    del sys.modules["gpu_command"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the installed package as a wheel."""
    place = Path(fastckpt.__file__).parent
    file = tmp_path_factory.mktemp("wheel") / f"fastckpt_io-0.0.0-cp310-abi3-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in place.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, f"fastckpt/{path.relative_to(place)}")
    return file


@pytest.fixture
def tree(tmp_path):
    """A checkout with the script and the benchmarks, into which each test writes its own device tests."""
    for name in ("scripts", "tests/device"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "checkout" / "scripts")
    (tmp_path / "checkout" / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tmp_path / "checkout"


def run(tree, *arguments, **more):
    """Run the script of a checkout without a GPU; return its exit status, its output and its two reports."""
    out = tree / "out"
    command = [sys.executable, tree / "scripts" / "gpu", out, *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=250, **more)
    assert not done.stderr, done.stderr
    return done, json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


def litter(place):
    return [entry for entry in place.iterdir() if entry.name.startswith("fastckpt-gpu-")]


# -- without a GPU -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_every_part_is_reported_as_not_run(tree, wheel):
    (tree / "tests" / "device" / "test_one.py").write_text("raise SystemExit('must not run')")
    done, report, text = run(tree, "--wheel", wheel)
    assert done.returncode == report["exit_status"] == 2
    status = {part["name"]: (part["status"], part["reason"]) for part in report["parts"]}
    assert status.pop("machine") == ("passed", "")
    assert status.pop("wheel") == ("passed", "")
    names = ["tests: test_one", *(f"benchmark: {name}" for name in ("link", "counts", "disk", "tmpfs", "training"))]
    assert status == dict.fromkeys(names, ("not run", "no GPU: torch sees no CUDA or ROCm device"))
    assert report["bars"] == []
    assert all(f"| {name} | not run |" in text for name in names)
    assert not litter(tree / "out")


def test_without_a_gpu_a_wheel_is_not_needed(tree):
    done, report, _ = run(tree)
    assert done.returncode == 2
    parts = {part["name"]: part for part in report["parts"]}
    assert parts["wheel"]["status"] == "not run"
    assert "scripts/setup" in parts["wheel"]["reason"]
    assert "no files tests/device" in parts["tests"]["reason"]


# -- with the CPU in the GPU's place -----------------------------------------------------------------------------------

SUITE = """
import os, unittest
class Tests(unittest.TestCase):
    def test_the_device(self):
        self.assertEqual(os.environ["FASTCKPT_TEST_DEVICE"], "standin")
    def test_the_wheel(self):
        import fastckpt
        self.assertTrue(os.path.realpath(fastckpt.__file__).startswith(os.path.realpath(os.environ["FASTCKPT_WHEEL"])))
    @unittest.skip("only there")
    def test_elsewhere(self): pass
"""


def with_benchmarks(gpu, monkeypatch, tree, **benchmarks):
    monkeypatch.setattr(gpu, "ROOT", tree)
    monkeypatch.setattr(gpu, "BENCHMARKS", benchmarks)


def test_tests_and_benchmarks_run_and_are_in_the_reports(gpu, monkeypatch, tree, wheel):
    with_benchmarks(gpu, monkeypatch, tree, link=(60, None, 0.01))
    # Another test may use /dev/shm itself.
    memory = Path(tempfile.mkdtemp(dir=gpu.MEMORY))
    monkeypatch.setattr(gpu, "MEMORY", memory)
    (tree / "tests" / "device" / "test_one.py").write_text(SUITE)
    out = tree / "out"
    assert gpu.main([str(out), "--device", "cpu", "--wheel", str(wheel)]) == 0
    report = json.loads((out / "report.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert {part["status"] for part in parts.values()} == {"passed"}
    assert parts["tests: test_one"]["result"] == {"tests": 3, "skipped": 1, "skips": ["test_elsewhere: only there"]}
    assert parts["benchmark: link"]["result"]["rates"]["d2h, pinned"] > 0
    text = (out / "report.md").read_text()
    assert "| test_one | 3 | 0 | 1 |" in text
    assert "- test_elsewhere: only there" in text
    assert "| h2d, pageable |" in text
    assert not litter(out)
    memory.rmdir()  # it must be empty


def test_a_benchmark_that_breaks_off_keeps_what_it_had_found(gpu, monkeypatch, tree, wheel):
    """The benchmark is killed after it wrote its figures; its figures stay, and the next benchmark runs."""
    (tree / "benchmarks").unlink()
    (tree / "benchmarks").mkdir()
    (tree / "benchmarks" / "gpu.py").write_text(
        "import json, os, pathlib, sys\n"
        "part, file = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        "bar = {'what': part, 'shown': '1', 'sign': 'at least 2', 'status': 'missed', 'met': False}\n"
        "file.write_text(json.dumps({'tables': [part + ' table'], 'bars': [bar]}))\n"
        "print('last words of', part)\n"
        "pathlib.Path(sys.argv[sys.argv.index('--directory') + 1], 'litter').mkdir()\n"
        "part == 'disk' and os.abort()\n"
    )
    with_benchmarks(gpu, monkeypatch, tree, disk=(60, "disk", 0.01), tmpfs=(60, "memory", 0.01))
    (tree / "tests" / "device" / "test_one.py").write_text(SUITE)
    out = tree / "out"
    assert gpu.main([str(out), "--device", "cpu", "--wheel", str(wheel)]) == 1
    parts = {part["name"]: part for part in json.loads((out / "report.json").read_text())["parts"]}
    assert (parts["benchmark: disk"]["status"], parts["benchmark: disk"]["reason"]) == ("failed", "killed by SIGABRT")
    assert parts["benchmark: tmpfs"]["status"] == "passed"
    text = (out / "report.md").read_text()
    for words in ("disk table", "tmpfs table", "last words of disk", "| disk | 1 | at least 2 | missed |"):
        assert words in text
    assert "last words of tmpfs" not in text
    # Only a quick run passes with a missed bar; no run passes with a failure.
    part = gpu.Part("benchmark", status="passed", result={"bars": [{"status": "missed"}]})
    tests = gpu.Part("tests: one", status="passed")
    assert (gpu.verdict([part, tests], quick=False), gpu.verdict([part, tests], quick=True)) == (1, 0)
    assert gpu.verdict([part], quick=True) == 1
    assert gpu.verdict([part, tests, gpu.Part("x", status="failed")], quick=True) == 1


def test_a_terminated_run_ends_its_part_and_still_reports(tree, wheel):
    (tree / "tests" / "device" / "test_hang.py").write_text(
        "import os, pathlib, time, unittest\n"
        "class Tests(unittest.TestCase):\n"
        "    def test_hang(self):\n"
        f"        pathlib.Path({str(tree / 'pid')!r}).write_text(str(os.getpid()))\n"
        "        time.sleep(600)\n"
    )
    out = tree / "out"
    command = [sys.executable, tree / "scripts" / "gpu", out, "--device", "cpu", "--wheel", wheel]
    script = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tree / "pid").exists() or not (tree / "pid").read_text():
        assert time.monotonic() < deadline
        assert script.poll() is None
        time.sleep(0.05)
    # Even if the script were killed now, it has reported the parts that ended.
    early = json.loads((out / "report.json").read_text())
    assert [(part["name"], part["status"]) for part in early["parts"]] == [("machine", "passed"), ("wheel", "passed")]
    script.terminate()
    assert script.wait(60) == 1
    parts = {part["name"]: part for part in json.loads((out / "report.json").read_text())["parts"]}
    assert parts["tests: test_hang"]["reason"] == "interrupted"
    assert "SIGTERM" in parts["the rest"]["reason"]
    assert not alive(int((tree / "pid").read_text()))
    assert not litter(out)


def test_the_size_of_a_state_follows_the_room(gpu, monkeypatch, tmp_path):
    """A part that measures tmpfs shrinks its state; a part that may write anywhere uses the disk."""
    places = {"memory": tmp_path / "memory", "disk": tmp_path / "disk"}
    rooms = {places["memory"]: 0.5, places["disk"]: 8.0}
    monkeypatch.setattr(gpu, "room", lambda place, _: rooms[place])
    options = gpu.arguments(["--device", "cpu"])

    def made(name):
        command = gpu.benchmark_part(name, options, gpu.Runner(600, {}), places, tmp_path / "r").command
        return [command[command.index(word) + 1] for word in ("--directory", "--size")]

    assert made("tmpfs") == [str(places["memory"]), "0.5000"]
    assert made("training") == [str(places["disk"]), "8.0000"]
    rooms[places["memory"]] = 16.0
    assert made("training") == [str(places["memory"]), "10.0000"]
    late = gpu.benchmark_part("training", options, gpu.Runner(20, {}), places, tmp_path / "r")
    assert (late.status, late.command) == ("not run", [])


def test_only_a_disk_has_a_limit_of_its_own(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.shutil, "disk_usage", lambda _: SimpleNamespace(free=100e9))
    monkeypatch.setattr(gpu, "available_memory", lambda: 100e9)
    assert gpu.room(tmp_path, tmp_path) == 8
    if gpu.MEMORY.stat().st_dev != tmp_path.stat().st_dev:
        assert gpu.room(gpu.MEMORY, tmp_path) == 25


def test_a_wheel_of_another_checkout_is_told(gpu, tmp_path):
    for name in ("wheel", "checkout"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "same.py").write_text("1")
        (tmp_path / name / "sub" / "other.py").write_text(name)
    (tmp_path / "checkout" / "more.py").write_text("1")
    assert gpu.differing(tmp_path / "wheel", tmp_path / "checkout") == ["more.py", "sub/other.py"]
    assert gpu.differing(tmp_path / "wheel", tmp_path / "wheel") == []


def test_the_tests_that_take_longest_come_last(gpu, monkeypatch, tmp_path):
    (tmp_path / "tests" / "device").mkdir(parents=True)
    for name in ("cuda", "async", "ways"):
        (tmp_path / "tests" / "device" / f"test_{name}.py").touch()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    parts = gpu.test_parts(sys.executable, 200)
    assert [(part.name[12:], part.seconds) for part in parts] == [
        ("async", 60),
        ("ways", 60),
        ("cuda", 200),
    ]


# -- one part ----------------------------------------------------------------------------------------------------------


def alive(pid):
    """Whether the process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def program(gpu, text, seconds=60.0, **more):
    return gpu.Part("part", [sys.executable, "-c", text], seconds, **more)


def test_a_part_that_fails_says_how_and_with_what_words(gpu):
    runner = gpu.Runner(60, dict(os.environ))
    parts = [
        runner.run(program(gpu, text))
        for text in (
            "print('fine')",
            "import sys; sys.exit('broken')",
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        )
    ]
    parts.append(runner.run(gpu.Part("part", ["/nonexistent/program"])))
    assert [(part.status, part.reason) for part in parts[:4]] == [
        ("passed", ""),
        ("failed", "exit status 1"),
        ("failed", "killed by SIGSEGV"),
        ("failed", "killed by SIGKILL: perhaps memory ran out"),
    ]
    assert parts[0].output == "fine\n"
    assert parts[1].output == "broken\n"
    assert parts[4].status == "failed"
    assert "could not be started" in parts[4].reason


def test_a_part_that_hangs_is_ended_with_its_children_at_its_deadline(gpu, tmp_path):
    """The part and its child both ignore SIGTERM."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    text = (
        "import pathlib, subprocess, sys, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "print('hanging', flush=True)\n"
        "time.sleep(600)\n"
    )
    runner = gpu.Runner(60, dict(os.environ))
    part = runner.run(program(gpu, text, 8.0))
    assert (part.status, part.reason) == ("failed", "ended at its deadline, after 8 s")
    assert part.output == "hanging\n"
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30  # the kernel reaps the child some time later
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert runner.run(program(gpu, "print(1)")).status == "passed"


def test_a_part_that_hangs_says_where(gpu):
    text = "import time\ndef waits_for_ever():\n    print('here', flush=True)\n    time.sleep(600)\nwaits_for_ever()"
    part = program(gpu, text, 8.0)
    part.command[1:1] = ["-X", "faulthandler"]
    gpu.Runner(60, dict(os.environ)).run(part)
    assert part.reason == "ended at its deadline, after 8 s"
    assert part.output.startswith("here\n")
    assert "in waits_for_ever" in part.output


def test_children_of_a_part_that_has_ended_end_as_well(gpu, tmp_path):
    text = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
    )
    assert gpu.Runner(60, dict(os.environ)).run(program(gpu, text)).status == "passed"
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_parts_beyond_the_deadline_of_all_do_not_run(gpu):
    runner = gpu.Runner(3, dict(os.environ))
    first = runner.run(program(gpu, "import time; time.sleep(600)"))
    assert first.reason.startswith("ended at its deadline")
    second = runner.run(program(gpu, "print(1)"))
    assert (second.status, second.reason, second.took) == ("not run", "the time was used up", 0.0)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("def test_a(self): pass", "passed", ""),
        ("def test_a(self): self.fail()\n    def test_b(self): 1 / 0", "failed", "1 failures, 1 errors"),
        ("@unittest.skip('no such thing')\n    def test_a(self): pass", "not run", "all were skipped: no such thing"),
        ("def test_a(self): os.abort()", "failed", "killed by SIGABRT"),
        ("pass", "failed", None),  # since Python 3.12, unittest itself fails
    ],
)
def test_what_unittest_prints_is_understood(gpu, monkeypatch, tmp_path, body, status, reason):
    (tmp_path / "tests" / "device").mkdir(parents=True)
    (tmp_path / "tests" / "device" / "test_x.py").write_text(
        f"import os, unittest\nclass Tests(unittest.TestCase):\n    {body}\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (part,) = gpu.test_parts(sys.executable, 60)
    gpu.Runner(60, {**os.environ, "PYTHONPATH": str(tmp_path / "tests")}).run(part)
    gpu.read_tests(part)
    assert part.status == status
    if reason is None:
        assert part.reason
    else:
        assert part.reason == reason


# -- the wheel ---------------------------------------------------------------------------------------------------------


def test_a_wheel_must_fit_by_its_tags(gpu, tmp_path):
    def refusal(tags):
        file = tmp_path / f"fastckpt_io-0.1.0-{tags}.whl"
        file.touch()
        return gpu.misfit(file)

    here, minor = platform.machine(), sys.version_info.minor
    assert refusal(f"cp310-abi3-manylinux_2_17_{here}.manylinux2014_{here}") is None
    assert refusal(f"cp3{minor}-cp3{minor}-linux_{here}") is None
    assert refusal(f"cp3{minor + 1}-cp3{minor + 1}-linux_{here}").endswith(f"this is Python 3.{minor}")
    assert refusal(f"cp3{minor - 1}-cp3{minor - 1}-linux_{here}").endswith(f"this is Python 3.{minor}")
    assert refusal(f"cp3{minor + 1}-abi3-linux_{here}").endswith(f"this is Python 3.{minor}")
    assert "needs glibc 9.9" in refusal(f"cp310-abi3-manylinux_9_9_{here}")
    assert refusal("cp310-abi3-manylinux_2_17_mips").endswith(f"this is {here}")
    assert refusal("cp310-abi3-macosx_11_0_arm64").endswith(f"this is {here}")
    assert "Python" in refusal("py3-none-any")
    assert gpu.misfit(tmp_path / "nothing-0-py3-none-any.whl") == "there is no such file"


def test_the_newest_wheel_that_fits_is_taken(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    names = [f"fastckpt_io-0.{number}-cp310-abi3-linux_{platform.machine()}.whl" for number in range(3)]
    for number, place in enumerate(("dist", "target/wheels", "dist")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        file = tmp_path / place / names[number]
        file.touch()
        os.utime(file, (1000 - number, 1000 - number))
    os.utime(tmp_path / "target" / "wheels" / names[1], (2000, 2000))
    portable = tmp_path / "dist" / "fastckpt_io-0.9-py3-none-any.whl"
    portable.touch()
    assert gpu.find_wheel(None) == (tmp_path / "target" / "wheels" / names[1], "")
    assert gpu.find_wheel(portable)[0] is None


# -- benchmarks/gpu.py -------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(children_with_torch, tmp_path):
    """Run a part, forked as its contenders are; return its result."""

    def go(part, *arguments):
        file = tmp_path / "result.json"
        command = [BENCHMARK, part, "--directory", tmp_path, "--json", file, *arguments]
        done = programs.run(children_with_torch, command, timeout=250, forks=True)
        assert not done.returncode, done.stderr
        found = json.loads(file.read_text())
        file.unlink()
        assert not list(tmp_path.iterdir()) or part == "counts"
        return found

    return go


@pytest.mark.slow
def test_transfers_are_held_against_storage_and_link(benchmark):
    peers = "raw,link,torch,fastckpt"
    found = benchmark("disk", "--device", "cpu", "--size", 0.01, "--rounds", 1, "--peers", peers)
    assert {"raw", "link", "torch", "fastckpt"} <= set(found["results"])
    assert found["results"]["fastckpt"].keys() == {"save", "load", "into"}
    assert found["rounds"] == len(found["results"]["link"]["load"]["samples"])
    assert all(bar["measured"] > 0 for bar in found["bars"])
    assert {bar["status"] for bar in found["bars"]} == {"not run: measured on cpu, not on a GPU"}
    assert [bar["limit"] for bar in found["bars"]] == [0.95, 0.95]
    assert any("`into=`" in line for line in found["tables"])
    assert found["failed"] == ""


@pytest.mark.slow
def test_a_training_loop_tells_what_saves_take_from_it(benchmark):
    found = benchmark("training", "--device", "cpu", "--size", 0.002, "--rounds", 1, "--seconds", 20)
    assert found["left_out"] == {}
    assert found["modes"].keys() == {"plain", "lazy", "torch.distributed.checkpoint"}
    for mode in ("plain", "lazy"):
        assert found["modes"][mode]["call"] > 0
        assert found["modes"][mode]["durable"] > 0
    # The hook of fastckpt runs between the two hooks.
    assert found["modes"]["lazy"]["held"] > 0
    assert found["beside"]["steps"] >= 2
    assert [bar["status"] for bar in found["bars"]] == ["not run: measured on cpu, not on a GPU"] * 2
    assert any("| lazy |" in line for line in found["tables"])


@pytest.mark.slow
def test_counts_are_taken_with_the_stand_in(benchmark):
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        needs.missing("needs torch 2.10 or newer, for the stand-in device")
    found = benchmark("counts", "--device", "standin", "--size", 0.04)
    assert len(found["states"]) == 2
    for operations in found["states"].values():
        assert operations.keys() == {"save", "save_async", "load", "into"}
        for name in ("save", "load", "into"):
            assert operations[name]["calls"] >= 1, name
            assert operations[name]["ranges"] >= operations[name]["calls"]
        assert operations["save_async"]["copied_per_byte"] == 0
    small = [bar for bar in found["bars"] if "calls" in bar["what"]]
    assert {bar["status"] for bar in small} == {"not run: the state is too small"}


def rounds(**rates):
    """Return an outcome with these GB/s in each round, by contender."""
    samples = {
        name: {
            way: [Sample(bytes=10**9, seconds=1 / rate, user=0, system=0) for rate in each] for way in ("save", "load")
        }
        for name, each in rates.items()
    }
    return Outcome(samples=samples)


def test_a_transfer_is_judged_round_by_round():
    outcome = rounds(fastckpt=[1.0, 4.0, 1.9], raw=[1.0, 8.0, 2.0], link=[2.0, 4.0, 9.0])
    saved, loaded = gpu_bars.transfer_bars(outcome, "cuda", memory=False)
    assert (saved.measured, saved.status, loaded.status) == (1.0, "met", "met")
    saved, _ = gpu_bars.transfer_bars(outcome, "cuda", memory=True)
    assert (saved.measured, saved.status, saved.limit) == (0.5, "missed", 0.8)
    saved, _ = gpu_bars.transfer_bars(rounds(fastckpt=[1.0]), "cuda", memory=True)
    assert (saved.measured, saved.status) == (None, "not run")


def test_the_stall_is_judged_for_ten_gigabytes_alone():
    mode = {"call": 0.003, "held": 0.001, "reported": 0.002, "lost": 0.05}
    found = {
        "device": "cuda",
        "bytes": 10**10,
        "copy": 0.2,
        "forward_backward": 0.1,
        "noise": 0.0,
        "modes": {"lazy": mode},
    }
    stall, lost = gpu_bars.training_bars(found)
    assert (stall.measured, stall.status) == (pytest.approx(4.0), "met")
    assert (lost.limit, lost.status) == (pytest.approx(0.1), "met")
    mode.update(reported=0.006, lost=0.11)
    assert [bar.status for bar in gpu_bars.training_bars(found)] == ["missed", "missed"]
    found["bytes"] = 10**9
    assert gpu_bars.training_bars(found)[0].status == "not run"
    assert "only 1 GB" in gpu_bars.training_bars(found)[0].document()["status"]


def test_counts_are_judged_by_gigabyte():
    each = {"calls": 70, "bytes": 10**9, "calls_per_gigabyte": 70.0, "copied_per_byte": 0.0}
    found = {"device": "cuda", "states": {"s": {"save": each, "load": {**each, "calls_per_gigabyte": 70.1}}}}
    assert [bar.status for bar in gpu_bars.count_bars(found)] == ["met", "met", "missed"]
    each["copied_per_byte"] = 0.01
    assert gpu_bars.count_bars(found)[1].status == "missed"
    each["calls"] = 0
    assert gpu_bars.count_bars(found)[0].status == "not run"
