"""``fastckpt doctor`` derives findings from made-up facts, and reads facts from made-up files."""

# ruff: noqa: PTH208, ARG005 - names as the directory has them; a lambda stands in for a function

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from fastckpt._tools import scratch
from fastckpt._tools.doctor import command, cuda, facts, findings, limits, measure, ring
from harness import zygote

GOOD = {
    "kernel": {"release": "6.18.0", "machine": "x86_64", "sandbox": None},
    "container": None,
    "process": {
        "uid": 1000,
        "groups": [1000],
        "sys_admin": False,
        "ipc_lock": False,
        "seccomp": 0,
        "seccomp_filters": 0,
        "lsm": None,
        "memlock": {"soft": 8 << 20, "hard": 8 << 20},
        "open_files": {"soft": 1024, "hard": 1024},
    },
    "io_uring": {
        "answer": "ok",
        "setup": "ok",
        "enter": "EBADF",
        "register": "EBADF",
        "disabled": 0,
        "group": -1,
        "configured": True,
    },
    "engine": {"requested": "auto", "engine": "uring", "fallback": None, "threads": 8},
    "directory": {
        "path": "/data",
        "type": "ext4",
        "source": "/dev/nvme0n1",
        "mount": "/data",
        "options": "rw",
        "network": False,
        "free_bytes": 10**12,
        "total_bytes": 10**13,
        "free_inodes": 10**6,
        "trouble": None,
    },
    "io": {
        "direct_open": "ok",
        "direct_write": "ok",
        "direct_read": "ok",
        "cachestat": "ok",
        "uncached": "ok",
        "fallocate": "ok",
        "reflink": "EOPNOTSUPP",
        "rename_exchange": "ok",
        "lock": "ok",
        "lock_reach": "machine",
        "direct_used": True,
        "direct_bypasses": True,
        "memory_alignment": 512,
        "offset_alignment": 512,
    },
    "cpu": {"online": 64, "affinity": 64, "quota": None, "local_world_size": None, "cores": 64},
    "memory": {
        "available_bytes": 10**11,
        "cgroup_limit_bytes": None,
        "transparent_huge_pages": "madvise",
        "huge_pages": "ok",
        "populate": "ok",
        "staging_bytes": 96 << 20,
    },
    "counters": {
        "off": False,
        "directory": "/dev/shm/fastckpt-1000",
        "type": "tmpfs",
        "refused": None,
        "writable": True,
        "free_bytes": 10**9,
        "needed_bytes": 20000,
    },
    "versions": {"fastckpt": "0.1.0", "python": "3.11", "numpy": "2", "torch": "2.15", "torch_cuda": "13.0"},
    "measured": None,
    "cuda": {"devices": 8, "version": "13.0", "error": None},
}


def made_up(**changes):
    """Return good facts with changes, by topic."""
    made = copy.deepcopy(GOOD)
    for topic, change in changes.items():
        made[topic] = {**made[topic], **change} if isinstance(change, dict) and made[topic] else change
    return made


def refused(setup, enter="EBADF", register="EBADF", **more):
    return {"answer": setup, "setup": setup, "enter": enter, "register": register, **more}


FILTER = {"seccomp": 2, "seccomp_filters": 1}
ROOT = {"uid": 0, "sys_admin": True, "ipc_lock": True}
OLD = {"disabled": None, "group": None, "configured": None}  # the kernel reports none before Linux 6.6


def test_good_facts_are_good():
    found = findings.diagnose(GOOD)
    assert (found.status, found.findings, found.engine) == (0, (), "uring")
    assert found.verdict == "all well: checkpoints in /data run on uring"


@pytest.mark.parametrize(
    ("name", "code", "says", "changes"),
    [
        (
            "Docker 25",
            "seccomp",
            "Docker's default profile",
            {"container": "docker", "process": FILTER, "io_uring": refused("EPERM", "EPERM", "EPERM")},
        ),
        (
            "Docker 25, before Linux 6.6, root",
            "seccomp",
            "Docker",
            {
                "container": "docker",
                "process": {**FILTER, **ROOT},
                "io_uring": refused("EPERM", "EPERM", "EPERM", **OLD),
            },
        ),
        (
            "containerd 2",
            "seccomp",
            "containerd",
            {"container": "kubernetes", "process": FILTER, "io_uring": refused("EPERM", "EPERM", "EPERM")},
        ),
        (
            "Podman",
            "seccomp",
            "Podman",
            {"container": "podman", "process": FILTER, "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS")},
        ),
        (
            "Podman on Ubuntu 22.04",
            "seccomp",
            "Podman",
            {
                "kernel": {"release": "5.15.0-105-generic"},
                "process": FILTER,
                "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", **OLD),
            },
        ),
        (
            "Podman on RHEL 9.3: two in the way",
            "seccomp",
            "change both",
            {
                "kernel": {"release": "5.14.0-362.el9.x86_64"},
                "container": "podman",
                "process": FILTER,
                "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", disabled=2),
            },
        ),
        (
            "Podman on RHEL 9.1, whose kernel has none",
            "missing",
            "5.14.0-162.el9",
            {
                "kernel": {"release": "5.14.0-162.el9.x86_64"},
                "container": "podman",
                "process": FILTER,
                "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", **OLD),
            },
        ),
        (
            "a filter on one call, before a kernel of RHEL 9 that was given io_uring",
            "seccomp",
            "ENOSYS",
            {
                "kernel": {"release": "5.14.0-162.el9.x86_64"},
                "process": FILTER,
                "io_uring": refused("ENOSYS", **OLD),
            },
        ),
        (
            "built without it, under a filter",
            "missing",
            "has no io_uring",
            {"process": FILTER, "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", **{**OLD, "configured": False})},
        ),
        (
            "RHEL 8",
            "missing",
            "4.18.0",
            {"kernel": {"release": "4.18.0-553.el8.x86_64"}, "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", **OLD)},
        ),
        (
            "gVisor",
            "gvisor",
            "gVisor",
            {
                "kernel": {"release": "4.4.0", "sandbox": "gvisor"},
                "process": FILTER,
                "io_uring": refused("ENOSYS", "ENOSYS", "ENOSYS", **OLD),
            },
        ),
        ("RHEL 9.3", "sysctl", "io_uring_disabled=2", {"process": ROOT, "io_uring": refused("EPERM", disabled=2)}),
        ("hardened host, an ordinary user", "sysctl", "=1", {"io_uring": refused("EPERM", disabled=1)}),
        (
            "the group is another",
            "sysctl",
            "io_uring_group",
            {"io_uring": refused("EPERM", disabled=1, group=500), "process": {"groups": [100, 1000]}},
        ),
        (
            "hardened host, in Docker: the call is let pass, the setting refuses",
            "sysctl",
            "=2",
            {"container": "docker", "process": {**FILTER, **ROOT}, "io_uring": refused("EPERM", disabled=2)},
        ),
        (
            "a filter on one call, and a setting that lets root pass",
            "seccomp",
            "EPERM",
            {"process": {**FILTER, **ROOT}, "io_uring": refused("EPERM", disabled=1)},
        ),
        (
            "a filter on one call, and a setting that lets the group pass",
            "seccomp",
            "EPERM",
            {"process": {**FILTER, "groups": [7]}, "io_uring": refused("EPERM", disabled=1, group=7)},
        ),
        (
            "a filter that lets only setup pass",
            "seccomp",
            "EPERM",
            {"process": FILTER, "io_uring": {"enter": "EPERM", "register": "EPERM"}},
        ),
        (
            "64 KiB on Linux 6.14, all ranks of a user",
            "memlock",
            "64 KiB",
            {"io_uring": refused("ENOMEM"), "process": {"memlock": {"soft": 65536, "hard": None}}},
        ),
        (
            "64 KiB in Docker, the profile changed already",
            "memlock",
            "64 KiB",
            {
                "container": "docker",
                "io_uring": refused("ENOMEM"),
                "process": {**FILTER, "memlock": {"soft": 65536, "hard": 65536}},
            },
        ),
        ("no memory: root", "memory", "no memory", {"io_uring": refused("ENOMEM"), "process": ROOT}),
        (
            "no memory: no limit",
            "memory",
            "no memory",
            {"io_uring": refused("ENOMEM"), "process": {"memlock": {"soft": None, "hard": None}}},
        ),
        (
            "SELinux",
            "selinux",
            "SELinux",
            {"io_uring": refused("EACCES"), "process": {"lsm": "selinux staff_u:staff_r:staff_t:s0"}},
        ),
        (
            "SELinux in a container with a filter",
            "selinux",
            "SELinux",
            {"io_uring": refused("EACCES"), "process": {**FILTER, "lsm": "selinux system_u:system_r:container_t:s0"}},
        ),
        ("another module", "lsm", "unknown security module", {"io_uring": refused("EPERM")}),
        ("too many files", "files", "1024", {"io_uring": refused("EMFILE")}),
        ("Linux 5.3", "old", "5.3.0", {"kernel": {"release": "5.3.0"}, "io_uring": {"answer": "ENOSYS", **OLD}}),
        ("flags unknown", "old", "too old", {"io_uring": refused("EINVAL")}),
        ("anything else", "unknown", "EIO", {"io_uring": refused("EIO")}),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else None,
)
def test_the_one_right_cause(name, code, says, changes):
    made = made_up(**changes, engine={"engine": "threads", "fallback": "io_uring: no"})
    found = findings.diagnose(made)
    assert [finding.code for finding in found.findings if finding.level == "warning"] == [f"io_uring-{code}"]
    assert says in found.findings[0].text
    assert (found.status, found.engine, found.why) == (1, "threads", "io_uring: no")
    if code in ("seccomp", "sysctl", "memlock"):
        assert set(found.findings[0].remedies) >= {"docker", "podman", "kubernetes", "host"}
        answer = made["io_uring"]["setup"]
        assert any(f"io_uring_setup answers {answer}" in line for line in found.findings[0].evidence)
    shown = command.lines(found)
    assert any(f"[io_uring-{code}]" in line for line in shown)
    # If the environment is known, such as Docker, only its remedy is shown.
    places = {line.split("(")[1].split(")")[0] for line in shown if line.startswith("  do (")}
    if made["container"] in found.findings[0].remedies:
        assert places == {made["container"]}


@pytest.mark.parametrize(
    ("code", "level", "changes"),
    [
        ("direct-refused", "warning", {"io": {"direct_open": "EINVAL", "direct_write": None, "direct_used": False}}),
        ("direct-refused", "warning", {"io": {"direct_write": "EINVAL"}}),
        ("direct-refused", "warning", {"io": {"direct_used": False, "memory_alignment": 0, "offset_alignment": 0}}),
        ("direct-alignment", "warning", {"io": {"direct_used": False, "offset_alignment": 65536}}),
        ("direct-buffered", "warning", {"io": {"direct_bypasses": False}}),
        ("rename-flags", "note", {"io": {"rename_exchange": "EINVAL"}}),
        ("no-locks", "note", {"io": {"lock": "ENOSYS"}}),
        ("no-locks", "note", {"io": {"lock_reach": "unknown"}}),
        ("no-fallocate", "note", {"io": {"fallocate": "EOPNOTSUPP"}}),
        ("memory-file-system", "warning", {"directory": {"type": "tmpfs"}, "io": {"direct_bypasses": False}}),
        ("overlay", "note", {"directory": {"type": "overlay", "mount": "/"}}),
        ("overlay", "note", {"directory": {"type": "overlay", "mount": "/mnt"}, "container": "docker"}),
        ("overlay", "warning", {"directory": {"type": "overlay", "mount": "/"}, "container": "docker"}),
        ("fuse", "warning", {"directory": {"type": "fuse", "source": "/data"}}),
        ("fuse", "note", {"directory": {"type": "fuse.other", "source": "other"}}),
        (None, None, {"directory": {"type": "fuse.gcsfuse", "source": "bucket", "network": True}}),
        ("little-space", "warning", {"directory": {"free_bytes": 10**8}}),
        ("few-inodes", "warning", {"directory": {"free_inodes": 10}}),
        (None, None, {"directory": {"free_inodes": None, "free_bytes": None}}),
        ("no-huge-pages", "warning", {"memory": {"transparent_huge_pages": "never"}}),
        ("no-huge-pages", "warning", {"memory": {"huge_pages": "EINVAL", "transparent_huge_pages": None}}),
        ("no-populate", "note", {"memory": {"populate": "EINVAL"}}),
        ("little-memory", "warning", {"memory": {"available_bytes": 10**8, "cgroup_limit_bytes": 2 * 10**8}}),
        ("few-cores", "warning", {"cpu": {"affinity": 4, "local_world_size": 8, "cores": 1}}),
        ("few-cores", "warning", {"cpu": {"quota": 0.5, "cores": 1}}),
        ("one-core", "note", {"cpu": {"local_world_size": 64, "cores": 1}}),
        ("no-counters", "note", {"counters": {"writable": False}}),
        ("no-counters", "note", {"counters": {"free_bytes": 0}}),
        ("no-counters", "note", {"counters": {"refused": "may wait", "writable": False, "free_bytes": None}}),
        (None, None, {"counters": {"writable": False, "off": True}}),
        ("torch-without-cuda", "note", {"versions": {"torch_cuda": None}}),
        (None, None, {"versions": {"torch_cuda": None, "torch": None}}),
        ("engine-chosen", "note", {"engine": {"requested": "threads", "engine": "threads"}}),
        ("engine-chosen", "warning", {"engine": {"requested": "buffered", "engine": "buffered"}}),
        ("little-memlock", "note", {"process": {"memlock": {"soft": 65536, "hard": 65536}}}),
        (None, None, {"process": {"memlock": {"soft": 65536, "hard": 65536}, "ipc_lock": True}}),
    ],
)
def test_everything_else(code, level, changes):
    found = findings.diagnose(made_up(**changes))
    assert [(finding.code, finding.level) for finding in found.findings] == ([(code, level)] if code else [])
    assert found.status == (1 if level == "warning" else 0)
    assert command.lines(found)
    json.dumps(found.document())


@pytest.mark.parametrize(
    ("error", "code", "more"),
    [
        ("ENOENT", "directory-missing", {}),
        ("ENOTDIR", "not-a-directory", {}),
        ("EACCES", "not-writable", {}),
        ("EPERM", "not-writable", {}),
        ("EROFS", "read-only", {}),
        ("ENOSPC", "no-space", {"free_bytes": 0}),
        ("ENOSPC", "no-inodes", {"free_inodes": 0}),
        ("EDQUOT", "quota", {}),
        ("EIO", "directory-fails", {}),
    ],
)
def test_where_no_checkpoint_can_be_made(error, code, more):
    trouble = {"operation": "create a directory in", "error": error}
    found = findings.diagnose(made_up(directory={"trouble": trouble, **more}, io=None))
    assert (found.status, [finding.code for finding in found.findings]) == (2, [code])
    assert error in " ".join(found.findings[0].evidence)
    assert found.findings[0].remedies
    assert found.verdict.startswith("cannot checkpoint in /data: ")
    assert command.lines(found)


def speeds(**more):
    return {"bytes": 10**8, "seconds": 0.1, "gigabytes_per_second": 1.0, **more}


def test_what_a_save_reported_goes_before_what_was_expected():
    save = speeds(engine="buffered", fallback="direct I/O: refused", rounds=3)
    raw = speeds(direct=False, threads=4)
    measured = {"raw_write": raw, "raw_read": raw, "save": save, "load": speeds(rounds=3), "error": None}
    found = findings.diagnose(made_up(measured=measured))
    assert (found.engine, found.why) == ("buffered", "direct I/O: refused")
    assert any("median of 3" in line for line in command.lines(found))
    # A save of a single operation never uses io_uring, even if it works.
    small = {**measured, "save": {**save, "engine": "threads", "fallback": None, "bytes": 1 << 20}}
    assert findings.diagnose(made_up(measured=small)).engine == "uring"
    measured = {**dict.fromkeys(measured), "error": "write /data/x: Input/output error (os error 5)"}
    found = findings.diagnose(made_up(measured=measured))
    assert (found.status, [finding.code for finding in found.findings]) == (2, ["trial-failed"])
    assert "Input/output error" in found.verdict


def test_the_worst_comes_first_and_names_the_verdict():
    found = findings.diagnose(
        made_up(io={"fallocate": "EOPNOTSUPP"}, memory={"transparent_huge_pages": "never"}, counters={"free_bytes": 0})
    )
    assert [finding.level for finding in found.findings] == ["warning", "note", "note"]
    assert found.verdict.endswith(found.findings[0].text)
    assert "(1 warning)" in found.verdict


def test_a_failing_trial_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def save(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fastckpt, "save", save)
    found = fastckpt.tools.doctor(tmp_path)
    assert (found.status, found.findings[0].code) == (2, "trial-failed")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_measurement_at_once(tmp_path, monkeypatch, number):
    """Code after the signal does not run, and the earlier handlers are restored."""
    after = []

    def save(*_):
        os.kill(os.getpid(), number)
        after.append("went on")

    def sent_anew(again):
        raise SystemExit(again)  # SIGTERM's default would end this process

    monkeypatch.setattr(fastckpt, "save", save)
    monkeypatch.setattr(scratch.signal, "raise_signal", sent_anew)
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}[number]
    before = signal.signal(number, default)
    try:
        with pytest.raises(SystemExit) as ended:
            fastckpt.tools.doctor(tmp_path)
        assert signal.getsignal(number) is default
    finally:
        signal.signal(number, before)
    assert ended.value.code == number
    assert after == []
    assert os.listdir(tmp_path) == []


def test_made_up_facts_have_the_keys_of_true_ones(tmp_path):
    """docs/doctor.md promises the keys, so this test fails if they change."""

    def keys(value):
        return {key: keys(item) for key, item in value.items()} if isinstance(value, dict) else None

    true = facts.collect(str(tmp_path), measured=False)
    assert keys(true) == keys(GOOD)
    json.dumps(true)
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    missing = [key for topic, value in GOOD.items() for key in (topic, *(value or {})) if f"`{key}`" not in page]
    assert missing == []


def test_every_code_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (findings, ring))
    codes = set(re.findall(r'code="([a-z_-]+)"|"(io_uring-[a-z]+)"', source))
    codes = {first or second for first, second in codes} | {code for code, *_ in findings._TROUBLES.values()}
    assert len(codes) > 30
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


# -- reading -----------------------------------------------------------------------------------------------------------


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"


def test_limits_of_control_groups_version_2(tmp_path):
    """The tightest limit among a group and its ancestors counts."""
    root = written(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/meminfo": MEMINFO,
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/memory.max": "500000\n",
            "sys/fs/cgroup/job/memory.current": "400000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        },
    )
    assert limits.cpu(root)["quota"] == 1.5
    assert limits.memory(root) == {
        "available_bytes": 200000,
        "cgroup_limit_bytes": 500000,
        "transparent_huge_pages": "never",
    }


def test_limits_of_control_groups_version_1(tmp_path):
    root = written(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/meminfo": MEMINFO,
            # A container without a namespace mounts its group as the root, and the name of its group does not exist.
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
        },
    )
    assert limits.cpu(root)["quota"] == 2
    memory = limits.memory(root)
    assert (memory["cgroup_limit_bytes"], memory["available_bytes"]) == (600000, 500000)
    written(
        root,
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert limits.cpu(root)["quota"] is None
    assert (limits.memory(root)["cgroup_limit_bytes"], limits.memory(root)["available_bytes"]) == (None, 800 * 1024)


def test_no_files_at_all_is_no_failure(tmp_path):
    assert limits.cpu(tmp_path)["quota"] is None
    assert set(limits.memory(tmp_path).values()) == {None}
    found = facts.collect(str(tmp_path), measured=False, root=tmp_path / "nothing")
    assert found["directory"]["type"] is None
    assert findings.diagnose(found).status == 0


@pytest.mark.parametrize(("value", "ranks"), [("8", 8), ("", None), ("0", None), ("many", None)])
def test_ranks(monkeypatch, value, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert limits.cpu()["local_world_size"] == ranks


def test_the_mount_of_a_path():
    mountinfo = (
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
        "30 27 0:30 / /data rw - xfs /dev/sdb rw,noquota\n"
        "31 30 0:31 / /data/my\\040disk rw master:2 - fuse.sshfs host:/x rw,user_id=0\n"
        "32 27 0:32 / /data rw,nosuid - nfs4 server:/export rw,vers=4.2\n"
        "broken\n"
    )
    cases = {"/": "ext4", "/database": "ext4", "/data": "nfs4", "/data/x/y": "nfs4", "/data/my disk/z": "fuse.sshfs"}
    assert {path: facts._mount(path, mountinfo)["type"] for path in cases} == cases
    assert facts._mount("/data/x", mountinfo) == {
        "type": "nfs4",
        "source": "server:/export",
        "mount": "/data",
        "options": "rw,nosuid,vers=4.2",
    }


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({}, {"container": "podman"}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"run/.containerenv": "", "var/run/secrets/kubernetes.io/x": ""}, {}, "kubernetes"),
        ({}, {"SLURM_JOB_ID": "1"}, "slurm"),
    ],
)
def test_what_runs_this_process(tmp_path, monkeypatch, files, environment, kind):
    for name in ("KUBERNETES_SERVICE_HOST", "container", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert facts._container(written(tmp_path, files)) == kind


def test_who_this_process_is(tmp_path):
    status = "Name:\tx\nCapEff:\t0000000000204000\nSeccomp:\t2\nSeccomp_filters:\t3\n"
    root = written(tmp_path, {"proc/self/status": status, "proc/self/uid_map": "   0   0 4294967295\n"})
    process = facts._process(root)
    assert (process["seccomp"], process["seccomp_filters"]) == (2, 3)
    assert process["sys_admin"]
    assert process["ipc_lock"]
    # The root user of a container has capabilities that the kernel does not count here.
    written(root, {"proc/self/uid_map": "0 100000 65536\n"})
    process = facts._process(root)
    assert not process["sys_admin"]
    assert not process["ipc_lock"]


def test_security_modules(tmp_path):
    label = "system_u:system_r:container_t:s0\0"
    assert facts._lsm(written(tmp_path / "a", {"proc/self/attr/current": label})) is None
    enforcing = written(tmp_path / "b", {"proc/self/attr/current": label, "sys/fs/selinux/enforce": "1"})
    assert facts._lsm(enforcing) == "selinux system_u:system_r:container_t:s0"
    apparmor = written(tmp_path / "c", {"proc/self/attr/current": "docker-default (enforce)\n"})
    assert facts._lsm(apparmor) == "apparmor docker-default (enforce)"
    assert facts._lsm(written(tmp_path / "d", {"proc/self/attr/current": "unconfined\n"})) is None


@pytest.mark.parametrize(
    ("version", "gvisor"),
    [("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016", True), ("Linux version 6.8.0 (x@y)", False)],
)
def test_gvisor_is_known_by_its_version(tmp_path, version, gvisor):
    found = facts._kernel(written(tmp_path, {"proc/version": version}))
    assert found["sandbox"] == ("gvisor" if gvisor else None)


def test_whether_the_kernel_was_built_with_it(tmp_path):
    import gzip
    import platform

    assert facts._configured(tmp_path / "a") is None
    assert facts._configured(written(tmp_path / "b", {f"boot/config-{platform.release()}": "CONFIG_IO_URING=y\n"}))
    zipped = written(tmp_path / "c", {"proc/x": ""})
    (zipped / "proc/config.gz").write_bytes(gzip.compress(b"# CONFIG_IO_URING is not set\n"))
    assert facts._configured(zipped) is False
    assert facts._configured(written(tmp_path / "d", {"proc/sys/kernel/io_uring_disabled": "2"}))


def test_the_build_of_torch_is_read_not_imported(tmp_path, monkeypatch):
    import importlib.util
    from types import SimpleNamespace

    written(tmp_path, {"torch/__init__.py": "raise RuntimeError", "torch/version.py": ""})
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for line, cuda_version in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.4'", "12.4"),
        ("cuda: Optional[str] = None", None),
        ("# nothing", None),
    ):
        (tmp_path / "torch/version.py").write_text(f"__version__ = '2'\n{line}\nhip: Optional[str] = None\n")
        assert facts._torch_cuda() == cuda_version


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ('print(\'{"devices": 8, "version": "13.0"}\')', {"devices": 8, "version": "13.0", "error": None}),
        ("raise OSError('libcuda.so.1: cannot open shared object file')", {"devices": 0}),
        ("raise SystemExit(3)", {"devices": None, "error": "exit status 3"}),
        ("import time; time.sleep(60)", {"devices": None, "error": "the driver has not answered for 0 s"}),
    ],
)
def test_the_driver_is_asked_with_patience(monkeypatch, question, expected):
    monkeypatch.setattr(cuda, "_QUESTION", question)
    monkeypatch.setattr(cuda, "_PATIENCE", 0.4 if "sleep" in question else 30.0)
    with cuda.asking() as answer:
        found = answer()
    assert expected.items() <= found.items()


@pytest.mark.parametrize(("free", "memory"), [(5 << 20, 1 << 40), (1 << 40, 4 << 20), (0, 0)])
def test_too_little_room_is_not_measured(tmp_path, free, memory):
    made = made_up(directory={"free_bytes": free}, memory={"available_bytes": memory})
    found = measure.measure(str(tmp_path), made)
    assert found["error"].startswith("not measured")
    made["measured"] = found
    assert [finding.code for finding in findings.diagnose(made).findings if finding.code == "not-measured"]


def test_a_slow_disk_is_measured_with_a_state_that_tells_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_PLAIN", 1e-6)
    found = measure.measure(str(tmp_path), made_up(directory={"free_bytes": 1 << 30}))
    assert found["save"]["bytes"] == 4 << 20
    assert found["save"]["engine"] == fastckpt.tools.probe(tmp_path).engine


def test_no_more_than_a_tenth_of_what_is_free(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, size: (seen.append(size), os.ftruncate(fd, size)))
    found = measure.measure(str(tmp_path), made_up(directory={"free_bytes": (45 << 20) + 77_777}))
    assert found["error"] is None
    assert max(*seen, found["save"]["bytes"]) <= 4.5 * (1 << 20) + 7_777


@pytest.mark.parametrize("how", ["alone", "runtime"])
def test_the_counters_go_where_a_save_puts_them(tmp_path, how):
    """Mutants: a second list of file systems that may wait, beside the core's; only the first place is tried."""
    code = (
        "import json, fastckpt, sys; from fastckpt import _core; from fastckpt._tools.doctor import facts;"
        "found = facts.collect(sys.argv[1], measured=False)['counters']; fastckpt.save({}, sys.argv[1] + '/c');"
        "print(json.dumps([found, _core.counters_refused()]))"
    )
    environment = {**zygote.environment(), "FASTCKPT_TOP_DIR": "/proc/self/none"}
    if how == "runtime":
        # This user's saves cannot use /dev/shm.
        del environment["FASTCKPT_TOP_DIR"]
        environment["XDG_RUNTIME_DIR"] = str(tmp_path)
        code = code.replace(
            "found = facts", "facts.os.access = lambda path, _: '/dev/shm' not in str(path); found = facts"
        )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    found, refused = json.loads(done.stdout)
    if how == "runtime":
        assert (found["directory"], found["refused"], found["writable"]) == (f"{tmp_path}/fastckpt", None, True)
    else:
        assert found["refused"] == refused
        assert "(proc)" in refused
        assert (found["writable"], found["free_bytes"], found["type"]) == (False, None, "proc")
