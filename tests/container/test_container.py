"""The wheel in the container where training runs: Ubuntu 22.04 with CPython 3.10 and no compiler, a read-only root, no
network, an ordinary user, io_uring refused by seccomp, 64 KiB of locked memory, a /dev/shm of 64 MiB, 1 GiB of memory
and 1.5 CPUs. ``scripts/container oldest`` runs the same tests in the oldest system that the wheel's tag supports.
"""

# ruff: noqa: PTH208 - names as the directory has them

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness import container, needs, roots, seccomp

TOP = Path(__file__).resolve().parents[2]
PROFILE = TOP / "docs" / "seccomp.json"
ROOT = os.environ.get("FASTCKPT_TEST_ROOT", "jammy")
#: The version of the C library of each root file system.
GLIBC = {"jammy": "2.35", "oldest": "2.27"}
MB = 10**6

pytestmark = [pytest.mark.root, pytest.mark.slow]

# Saves so slowly that the save would take days, and reports when the first file exists.
ENDLESS = """
import os, sys, threading, time
import numpy as np, fastckpt
path, size = sys.argv[1], int(sys.argv[2])
parent, name = os.path.split(path)
state = {"weights": np.ones(size, np.uint8)}
slowly = {"io": fastckpt.IO(bandwidth_limit="1kB/s")}
threading.Thread(target=fastckpt.save, args=(state, path), kwargs=slowly, daemon=True).start()
prefix = f".{name}.tmp-"
def begun():
    found = [entry for entry in os.listdir(parent) if entry.startswith(prefix)]
    return any(os.path.exists(f"{parent}/{entry}/model.safetensors") for entry in found if OWN in entry)
OWN = f"-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-"
while not begun():
    time.sleep(0.01)
print("writing", flush=True)
sys.stdin.readline()
"""

SAVE = """
import json, logging, resource, sys
import numpy as np, fastckpt
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
path, size = sys.argv[1], int(sys.argv[2])
state = {"weights": np.random.default_rng(0).integers(0, 256, size, np.uint8), "step": 7}
sum = int(state["weights"].sum(dtype=np.uint64))
report = fastckpt.save(state, path)
del state
state = fastckpt.load(path)
assert state["step"] == 7 and int(state["weights"].sum(dtype=np.uint64)) == sum
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
told = {"engine": report.engine, "fallback": report.fallback, "threads": report.threads, "text": str(report)}
print(json.dumps({**told, "peak": peak}))
"""


@pytest.fixture(scope="module")
def root():
    needs.root()
    return roots.root(ROOT)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels that pip downloads on a machine with a network for a machine without one."""
    built = TOP / "target" / "wheels"
    ours = [*built.glob("fastckpt_io-*-manylinux*_x86_64.whl"), *built.glob("fastckpt_top-*.whl")]
    if len(ours) != 2:
        needs.missing(f"needs one wheel each of fastckpt-io and fastckpt-top in {built} (scripts/setup makes them)")
    into = tmp_path_factory.mktemp("wheels")
    major, minor = GLIBC[ROOT].split(".")
    tags = [f"manylinux_{major}_{number}_x86_64" for number in range(17, int(minor) + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version=3.10", "--implementation=cp"]
    command += [f"--abi={abi}" for abi in ("cp310", "abi3", "none")]
    command += [f"--platform={tag}" for tag in (*tags, "manylinux2014_x86_64")]
    # The command names the files, because an index may have other files of the same name.
    command += [f"--dest={into}", *map(str, ours)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    into.chmod(0o755)
    for wheel in into.iterdir():
        wheel.chmod(0o644)
    return into


@pytest.fixture(scope="module")
def place():
    """A directory on the disk that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-pods-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def installed(root, wheels, place):
    """The home directory after pip, and the result of pip."""
    home = place / "home"
    home.mkdir()
    with container.running(container.Spec(root=root, upper=home, volumes={"/wheels": wheels})) as made:
        command = ("python3", "-m", "pip", "install", "--user", "--no-index", "--find-links", "/wheels")
        said = made.exec(*command, "fastckpt-io", "fastckpt-top")
    return home, said


@pytest.fixture(scope="module")
def volume(place):
    """The volume of checkpoints, which all pods share."""
    return owned(place / "checkpoints")


def owned(directory, user=container.USER):
    directory.mkdir()
    os.chown(directory, user, user)
    return directory


@pytest.fixture(scope="module")
def spec(root, installed, volume):
    """A function that makes the specification of a pod; keyword arguments change it."""
    home, said = installed
    assert said.returncode == 0, said.stderr

    def make(volumes=None, **more):
        return container.Spec(root=root, home=[home], volumes={"/checkpoints": volume, **(volumes or {})}, **more)

    return make


@pytest.fixture(scope="module")
def pod(spec):
    """The usual pod, which several tests share."""
    with container.running(spec()) as running:
        yield running


@contextlib.contextmanager
def writing(running, path, size=64 * MB, **how):
    """Keep a save in progress while the block runs."""
    child = running.start("python3", "-c", ENDLESS, path, str(size), **how)
    said = child.stdout.readline()
    assert said == "writing\n", child.communicate()
    yield child


def litter(volume, name):
    """Return the leftovers of saves to ``name``: other tests use the same volume."""
    return sorted(entry for entry in os.listdir(volume) if entry.startswith(f".{name}."))


def diagnosed(running, directory, *options, **how):
    """Return the result of ``fastckpt doctor``: status, document, findings by code."""
    done = running.exec("fastckpt", "doctor", directory, "--json", *options, **how)
    assert done.returncode in (0, 1, 2), done.stderr
    document = json.loads(done.stdout)
    return done.returncode, document, {finding["code"]: finding for finding in document["findings"]}


def seen(*arguments, env=None):
    """Return the paths of the operations that ``fastckpt-top`` sees on the host, and whether each is alive."""
    command = [sys.executable, "-m", "fastckpt_top", "--once", "--json", "--interval", "0.2", *arguments]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FASTCKPT")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**plain, **(env or {})})
    assert done.returncode == 0, done.stderr
    return shown(done.stdout)


def shown(text):
    ticks = [json.loads(line) for line in text.splitlines()]
    last = [tick for tick in ticks if tick["kind"] == "tick"][-1]
    return [(rank["path"], rank["alive"]) for rank in last["ranks"]]


# -- installing --------------------------------------------------------------------------------------------------------


def test_pip_installs_without_network_or_compiler(installed, root, spec):
    _, said = installed
    assert said.returncode == 0, said.stderr
    assert "Successfully installed" in said.stdout
    for program in ("cc", "gcc", "clang", "c99"):
        assert not any((root / place / program).exists() for place in ("bin", "usr/bin", "usr/local/bin"))
    with container.running(spec()) as running:
        told = running.python(
            "import os, platform, socket, sys, fastckpt\n"
            "where = os.path.dirname(fastckpt.__file__)\n"
            "print(platform.libc_ver()[1], sys.version_info[:2], where, os.getuid() != 0)\n"
            "print([name for _, name in socket.if_nameindex()], os.access('/usr', os.W_OK))"
        )
        first, second = told.splitlines()
        assert first.startswith(f"{GLIBC[ROOT]} (3, 10) /home/.local/"), told
        assert first.endswith("True"), "not an ordinary user"
        assert second == "['lo'] False"
        status = running.python("print(open('/proc/self/status').read())")
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        for command in ("fastckpt", "fastckpt-top"):
            done = running.exec(command, "--version")
            assert (done.returncode, done.stderr) == (0, ""), done


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_save_falls_back_and_says_so(pod):
    done = pod.exec("python3", "-c", SAVE, "/checkpoints/falls-back", str(64 * MB))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # The threads mostly wait for the device, so their number does not follow the quota.
    assert (told["engine"], told["threads"]) == ("threads", 12)
    assert "io_uring" in told["fallback"]
    assert "EPERM" in told["fallback"] or "not permitted" in told["fallback"], told["fallback"]
    assert told["fallback"] in told["text"]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING fastckpt")]
    assert len(warnings) == 1, done.stderr
    assert told["fallback"] in warnings[0]


def test_large_states_and_several_ranks_stay_within_the_limits(spec):
    """One process saves 400 MB, then four save 100 MB each, within a limit of 1 GiB that counts the page cache."""
    with container.running(spec()) as running:
        done = running.exec("python3", "-c", SAVE, "/checkpoints/large", str(400 * MB), seconds=280)
        assert done.returncode == 0, f"exit {done.returncode}, {running.groups.killed} killed: {done.stderr}"
        told = json.loads(done.stdout)
        # The peak includes the state, the staging memory of a save (96 MiB), and the interpreter.
        assert told["peak"] < 400 * MB + (96 << 20) + 120 * MB, told
        ranks = [
            running.start(
                *("python3", "-c", SAVE, f"/checkpoints/rank-{rank}", str(100 * MB)),
                env={"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(4)
        ]
        ends = [(*rank.communicate(timeout=280), rank.returncode) for rank in ranks]
        assert [code for *_, code in ends] == [0] * 4, ends
        assert running.groups.killed == 0
        for name in ("large", *(f"rank-{rank}" for rank in range(4))):
            shutil.rmtree(running.spec.volumes["/checkpoints"] / name)


def test_a_full_dev_shm_stops_no_save(pod):
    fill = (
        "f = open('/dev/shm/full', 'wb')\ntry:\n while True: f.write(bytes(1 << 20)); f.flush()\nexcept OSError: pass"
    )
    pod.python(fill)
    try:
        done = pod.exec("python3", "-c", SAVE, "/checkpoints/full-shm", str(8 * MB))
        assert done.returncode == 0, done.stderr
        status, document, found = diagnosed(pod, "/checkpoints", "--no-probe")
        assert "is full" in found["no-counters"]["text"]
        assert "medium: Memory" in found["no-counters"]["remedies"]["kubernetes"]
        assert "--shm-size" in found["no-counters"]["remedies"]["docker"]
        assert document["facts"]["counters"]["free_bytes"] < document["facts"]["counters"]["needed_bytes"]
        assert status == 1  # because of the filter; the counters are only a note
    finally:
        pod.python("import os; os.unlink('/dev/shm/full')")
    assert "no-counters" not in diagnosed(pod, "/checkpoints", "--no-probe")[2]


def test_a_save_that_the_kernel_kills_for_memory_leaves_the_old_checkpoint(spec, volume):
    greedy = ENDLESS.replace("sys.stdin.readline()", "held = []\nwhile True:\n held.append(b'x' * (1 << 24))")
    with container.running(spec(memory=256 << 20)) as running:
        assert json.loads(running.python(SAVE, "/checkpoints/step", str(8 * MB)))["engine"] == "threads"
        child = running.start("python3", "-c", greedy, "/checkpoints/step", str(32 * MB))
        assert child.stdout.readline() == "writing\n", child.communicate()
        assert child.wait(120) in (-9, 137)
        assert running.groups.killed >= 1
        assert len(litter(volume, "step")) == 1
        assert running.python("import fastckpt; print(fastckpt.load('/checkpoints/step')['step'])") == "7\n"
        assert running.exec("fastckpt", "verify", "/checkpoints/step").returncode == 0
        # The next save sweeps the leftovers.
        running.python(SAVE, "/checkpoints/step", str(8 * MB))
    assert litter(volume, "step") == []


# -- the doctor --------------------------------------------------------------------------------------------------------


def test_the_doctor_names_the_filter_and_how_to_allow_io_uring(pod):
    status, document, found = diagnosed(pod, "/checkpoints", env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (status, document["engine"]) == (1, "threads")
    assert found["io_uring-seccomp"]["level"] == "warning"
    assert "EPERM" in found["io_uring-seccomp"]["text"]
    assert "localhostProfile" in found["io_uring-seccomp"]["remedies"]["kubernetes"]
    assert document["facts"]["container"] == "kubernetes"
    screen = pod.exec("fastckpt", "doctor", "/checkpoints", "--no-probe").stdout
    assert "docs/containers.md" in screen


def test_the_doctor_names_locked_memory(spec):
    with container.running(spec(seccomp=b"")) as running:
        _, document, found = diagnosed(running, "/checkpoints", "--no-probe")
        assert document["facts"]["process"]["memlock"] == {"soft": 65536, "hard": 65536}
        assert "64 KiB" in found["little-memlock"]["text"]
        assert "LimitMEMLOCK" in found["little-memlock"]["remedies"]["kubernetes"]
        assert "io_uring-seccomp" not in found
    with container.running(spec(seccomp=b"", memlock=0)) as running:
        _, document, found = diagnosed(running, "/checkpoints", "--no-probe")
        assert found["io_uring-memlock"]["level"] == "warning"
        assert "--ulimit memlock" in found["io_uring-memlock"]["remedies"]["docker"]
        done = running.exec("python3", "-c", SAVE, "/checkpoints/no-memlock", str(32 * MB))
        assert json.loads(done.stdout)["engine"] == "threads", done.stderr


def test_the_doctor_names_limits_of_control_groups(pod, spec):
    _, document, found = diagnosed(pod, "/checkpoints", "--no-probe")
    facts = document["facts"]
    assert (facts["cpu"]["quota"], facts["cpu"]["cores"]) == (1.5, min(2, os.cpu_count()))
    assert facts["memory"]["cgroup_limit_bytes"] == 1 << 30
    assert facts["memory"]["available_bytes"] < 1 << 30
    with container.running(spec(cpus=1)) as running:
        _, _, found = diagnosed(running, "/checkpoints", "--no-probe")
        assert "quota 1" in " ".join(found["one-core"]["evidence"])
        assert "limits.cpu" in found["one-core"]["remedies"]["kubernetes"]
    with container.running(spec(memory=160 << 20, cpus=0.5)) as running:
        _, document, found = diagnosed(running, "/checkpoints", "--no-probe")
        assert "limit of the control group" in " ".join(found["little-memory"]["evidence"])
        assert "limits.memory" in found["little-memory"]["remedies"]["kubernetes"]
        assert "quota 0.5" in " ".join(found["few-cores"]["evidence"])
        assert "limits.cpu" in found["few-cores"]["remedies"]["kubernetes"]


def test_the_doctor_names_what_cannot_be_written(spec, volume):
    with container.running(spec(volumes={"/scratch": volume}, read_only=["/scratch"])) as running:
        status, _, found = diagnosed(running, "/scratch")
        assert (status, found["read-only"]["level"]) == (2, "error")
        assert "readOnly" in found["read-only"]["remedies"]["kubernetes"]
        # The root file system is read-only and belongs to another user.
        status, _, found = diagnosed(running, "/usr")
        assert status == 2
        assert {"read-only", "not-writable"} & set(found)
    theirs = owned(volume.parent / "theirs", 0)
    with container.running(spec(volumes={"/scratch": theirs})) as running:
        status, _, found = diagnosed(running, "/scratch")
        assert status == 2
        assert "fsGroup" in found["not-writable"]["remedies"]["kubernetes"]
        assert "--user" in found["not-writable"]["remedies"]["docker"]


# -- the monitor -------------------------------------------------------------------------------------------------------


def test_the_monitor_outside_sees_the_job_inside(spec, place):
    """As in docs/telemetry.md, 10: as root through /proc, by a shared directory, or by one bound to /dev/shm."""
    # A volume of Kubernetes belongs to root; the job makes its own directory there.
    shared, bound = owned(place / "telemetry", 0), owned(place / "bound")
    shared.chmod(0o777)
    bound.chmod(0o700)
    volumes = {"/telemetry": shared, f"/dev/shm/fastckpt-{container.USER}": bound}
    with container.running(spec(volumes, host="pod-0")) as running, contextlib.ExitStack() as saves:
        named = saves.enter_context(writing(running, "/checkpoints/named", env={"FASTCKPT_TOP_DIR": "/telemetry/job"}))
        saves.enter_context(writing(running, "/checkpoints/bound"))
        assert seen(env={"FASTCKPT_TOP_DIR": str(shared / "job")}) == [("/checkpoints/named", True)]
        assert seen("--dir", str(bound)) == [("/checkpoints/bound", True)]
        everyone = seen("--all-users")
        assert ("/checkpoints/bound", True) in everyone
        assert ("/checkpoints/named", True) not in everyone
        # A sidecar is another container with the shared directory. Only the same user may read there.
        look = ("fastckpt-top", "--once", "--json", "--interval", "0.2")
        where = {"FASTCKPT_TOP_DIR": "/telemetry/job"}
        with container.running(spec({"/telemetry": shared}, host="sidecar")) as sidecar:
            done = sidecar.exec(*look, env=where)
            assert done.returncode == 0, done.stderr
            assert shown(done.stdout) == [("/checkpoints/named", True)]
        with container.running(spec({"/telemetry": shared}, host="sidecar", user=container.USER + 20_000)) as sidecar:
            done = sidecar.exec(*look, env=where)
            assert "ermission denied" in done.stdout + done.stderr, done
        assert named.poll() is None
        running.kill()
        # A dead process is shown as dead, although its PID may exist in another PID namespace.
        assert seen(env={"FASTCKPT_TOP_DIR": str(shared / "job")}) == [("/checkpoints/named", False)]
    with container.running(spec(host="pod-1")) as running, writing(running, "/checkpoints/hidden"):
        # Nothing is shared, but root finds the operation through /proc.
        assert ("/checkpoints/hidden", True) in seen("--all-users")


# -- pods that die -----------------------------------------------------------------------------------------------------


def test_the_next_pod_sweeps_what_a_killed_one_left(spec, volume):
    """Pods on a node have different host names and PID namespaces: dead saves are swept, live saves stay."""
    with contextlib.ExitStack() as pods:
        first = pods.enter_context(container.running(spec(host="job-aaaa")))
        first.python(SAVE, "/checkpoints/swept", "1000000")
        pods.enter_context(writing(first, "/checkpoints/swept"))
        living = pods.enter_context(container.running(spec(host="job-bbbb")))
        alive = pods.enter_context(writing(living, "/checkpoints/swept"))
        assert len(litter(volume, "swept")) == 2
        first.kill()
        with container.running(spec(host="job-cccc")) as third:
            listed = third.exec("fastckpt", "clean", "/checkpoints").stdout
            assert "aaaa" in listed
            assert third.python("import fastckpt; print(fastckpt.load('/checkpoints/swept')['step'])") == "7\n"
            third.python(SAVE, "/checkpoints/swept", "2000000")
        [left] = litter(volume, "swept")
        assert "bbbb" in left
        assert alive.poll() is None
        living.kill()
    with container.running(spec(host="job-dddd")) as last:
        last.python(SAVE, "/checkpoints/swept", "3000000")
    assert litter(volume, "swept") == []


# -- the profile -------------------------------------------------------------------------------------------------------

REFUSED = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
def answer(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *(ctypes.c_long(argument) for argument in arguments))
    return ctypes.get_errno()
NEWUSER = 0x10000000
# Numbers of x86_64: unshare, clone, mount, bpf, keyctl, userfaultfd, perf_event_open, socket(AF_VSOCK), clone3
print(json.dumps([answer(272, NEWUSER), answer(56, NEWUSER | 17, 0, 0, 0, 0), answer(165, 0, 0, 0, 0, 0),
    answer(321, 0, 0, 0), answer(250, 0, 0, 0, 0, 0), answer(323, 1), answer(298, 0, 0, 0, 0, 0),
    answer(41, 40, 1, 0), answer(435, 0, 0)]))
"""


def test_the_profile_allows_a_ring_and_no_more(spec):
    """With docs/seccomp.json and 64 KiB of locked memory, io_uring works, and the usual refusals of containers stay."""
    with container.running(spec(seccomp=seccomp.profile(PROFILE))) as running:
        told = json.loads(running.python(SAVE, "/checkpoints/ring", str(64 * MB)))
        assert (told["engine"], told["fallback"]) == ("uring", None)
        # There are as many threads as cores in the quota, where a fraction counts as a core.
        assert told["threads"] == min(2, os.cpu_count())
        status, document, found = diagnosed(running, "/checkpoints")
        assert document["engine"] == "uring"
        assert "io_uring-seccomp" not in found
        assert document["facts"]["process"]["seccomp"] == 2
        assert status == 0, document["verdict"]
        assert running.exec("fastckpt-top", "--once").returncode == 0
        refused = json.loads(running.python(REFUSED))
        eperm, enosys = errno.EPERM, errno.ENOSYS
        assert refused == [eperm, enosys, eperm, eperm, eperm, eperm, eperm, enosys, enosys]
    # Without the filter, most of these calls reach the kernel, and only the user's rights limit them.
    with container.running(spec(seccomp=b"")) as running:
        assert json.loads(running.python(REFUSED)) != refused


def test_torch_works_under_the_profile(tmp_path):
    """The test uses the Python of this machine: an image with torch is too large for a test."""
    program = (
        "import sys, numpy, torch, fastckpt, subprocess\n"
        "state = {'w': torch.arange(4_000_000.0), 'n': numpy.ones(3)}\n"
        "report = fastckpt.save(state, sys.argv[1])\n"
        "back = fastckpt.load(sys.argv[1])\n"
        "assert torch.equal(back['w'], state['w'])\n"
        "assert torch.ones(300, 300).mm(torch.ones(300, 300))[0, 0] == 300\n"
        "assert next(iter(torch.utils.data.DataLoader([1, 2], num_workers=1, batch_size=2))).tolist() == [1, 2]\n"
        "subprocess.run(['true'], check=True)\n"
        "print(report.engine)"
    )
    command = [
        sys.executable,
        "-m",
        "harness.seccomp",
        str(PROFILE),
        "--",
        sys.executable,
        "-W",
        "error",
        "-c",
        program,
    ]
    env = {**os.environ, "PYTHONPATH": str(TOP / "tests")}
    done = subprocess.run([*command, str(tmp_path / "step")], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, "uring\n"), done.stderr


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_names_tests_that_exist():
    page = (TOP / "docs" / "containers.md").read_text("utf-8")
    here = Path(__file__).read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named
    assert [name for name in sorted(named) if f"def {name}(" not in here] == []
    # Each row of advice says whether the advice was tried.
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| advice", "| ---"))]
    assert rows
    assert [row for row in rows if "`test_" not in row and "not tested" not in row] == []
