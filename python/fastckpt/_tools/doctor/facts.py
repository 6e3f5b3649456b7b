"""The facts: reports of the kernel, the file system and the process. No judgement.

Answers of the system are ``"ok"``, the name of an errno, or None if nothing was queried.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._paths import refuse_url
from fastckpt._tools.scratch import Signals

from . import cuda, limits, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

_CAP_IPC_LOCK, _CAP_SYS_ADMIN = 14, 21
#: The kernel version that gVisor reports on any host.
_GVISOR = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"
#: Clients of remote storage, by the names of their mounts.
_NETWORK = (
    *("nfs", "nfs4", "lustre", "gpfs", "ceph", "fuse.ceph", "cifs", "smb3", "9p", "virtiofs", "beegfs", "wekafs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.blobfuse2", "fuse.juicefs", "fuse.glusterfs"),
)


def collect(directory: str, *, measured: bool, counted: bool = True, root: Path = Path("/")) -> dict[str, Any]:
    """Gather all facts about ``directory`` and this process.

    Args:
        directory: the directory for checkpoints.
        measured: whether to time reading and writing.
        counted: whether the timed saves show in the live counters.
        root: the directory that contains ``/proc``, ``/sys`` and the like.
    """
    refuse_url("doctor", directory)
    with cuda.asking() as devices:
        requested = os.environ.get("FASTCKPT_IO") or "auto"
        with Signals(held=True):  # the core makes and removes files, which takes milliseconds
            probe = fastckpt.tools.probe(directory)
        found: dict[str, Any] = {
            "kernel": _kernel(root),
            "container": _container(root),
            "process": _process(root),
            "io_uring": _ring(probe.ring, root),
            "engine": {"requested": requested, **_pick(probe, "engine", "fallback", "threads")},
            "directory": _directory(directory, probe.trouble, root),
            "io": _io(probe.files),
            "cpu": {**limits.cpu(root), "cores": probe.cores},
            "memory": {
                **limits.memory(root),
                "huge_pages": _name(probe.huge_pages),
                "populate": _name(probe.populate),
                "staging_bytes": probe.staging,
            },
            "counters": _counters(probe.counters, probe.counters_at, root),
            "versions": _versions(),
        }
        found["measured"] = None
        if measured and probe.files:
            with contextlib.nullcontext() if counted else measure.uncounted():
                found["measured"] = measure.measure(directory, found)
        return {**found, "cuda": devices()}


def _name(number: int | None) -> str | None:
    """Return the answer of a system call as text."""
    if number is None:
        return None
    # This errno has two names; the manual pages use EOPNOTSUPP.
    names = {0: "ok", errno.EOPNOTSUPP: "EOPNOTSUPP"}
    return names.get(number) or errno.errorcode.get(number, str(number))


def _text(path: Path) -> str | None:
    """Return the content of a small file of the kernel, or None."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _kernel(root: Path) -> dict[str, Any]:
    release, version = platform.release(), _text(root / "proc/version") or ""
    gvisor = "gvisor" in release.lower() or version.startswith(_GVISOR)
    return {"release": release, "machine": platform.machine(), "sandbox": "gvisor" if gvisor else None}


def _container(root: Path) -> str | None:
    """Return the environment of this process: Kubernetes comes before the runtimes that it uses."""
    environment = os.environ
    if "KUBERNETES_SERVICE_HOST" in environment or (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if (root / "run/.containerenv").exists() or environment.get("container") == "podman":
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return "slurm" if "SLURM_JOB_ID" in environment else None


def _process(root: Path) -> dict[str, Any]:
    status = dict(re.findall(r"^(\w+):\t(.*)$", _text(root / "proc/self/status") or "", re.MULTILINE))
    # For these checks, capabilities count only in the initial user namespace.
    first = (_text(root / "proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    held = int(status.get("CapEff", "0"), 16) if first else 0
    return {
        "uid": os.geteuid(),
        "groups": sorted({os.getegid(), *os.getgroups()}),
        "sys_admin": bool(held >> _CAP_SYS_ADMIN & 1),
        "ipc_lock": bool(held >> _CAP_IPC_LOCK & 1),
        "seccomp": int(status.get("Seccomp", 0)),
        "seccomp_filters": int(status["Seccomp_filters"]) if "Seccomp_filters" in status else None,
        "lsm": _lsm(root),
        "memlock": _limit("RLIMIT_MEMLOCK"),
        "open_files": _limit("RLIMIT_NOFILE"),
    }


def _limit(name: str) -> dict[str, int | None]:
    """Return a resource limit; None is unlimited."""
    import resource  # noqa: PLC0415 - where it is missing, the probe has said so

    which = getattr(resource, name)
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return {"soft": soft, "hard": hard}


def _lsm(root: Path) -> str | None:
    """Return the security module that confines this process, with its label, or None."""
    label = (_text(root / "proc/self/attr/current") or "").rstrip("\0")
    if _text(root / "sys/fs/selinux/enforce") == "1":
        return f"selinux {label}".strip()
    return f"apparmor {label}" if label and "unconfined" not in label and ":" not in label else None


def _ring(ring: Any, root: Path) -> dict[str, Any]:
    sysctl = root / "proc/sys/kernel"
    return {
        "answer": _name(ring.refused),
        **{call: _name(answer) for call, answer in _pick(ring, "setup", "enter", "register").items()},
        "disabled": _number(sysctl / "io_uring_disabled"),
        "group": _number(sysctl / "io_uring_group"),
        "configured": _configured(root),
    }


def _configured(root: Path) -> bool | None:
    """Whether the kernel was built with io_uring, None if it does not report it."""
    if (root / "proc/sys/kernel/io_uring_disabled").exists():
        return True
    config = None
    with contextlib.suppress(OSError, EOFError):
        import gzip  # noqa: PLC0415 - seldom needed

        config = gzip.decompress((root / "proc/config.gz").read_bytes()).decode("utf-8", "replace")
    config = config or _text(root / f"boot/config-{platform.release()}")
    return None if config is None else "CONFIG_IO_URING=y" in config


def _directory(directory: str, trouble: tuple[str, int] | None, root: Path) -> dict[str, Any]:
    path = os.path.realpath(directory)
    found: dict[str, Any] = {"path": path, **_mount(path, _text(root / "proc/self/mountinfo") or "")}
    found["network"] = found["type"] in _NETWORK
    room = None
    with contextlib.suppress(OSError):
        room = os.statvfs(path)
    if room and not room.f_blocks:
        room = None  # the size is not reported (ramfs, some FUSE ones)
    found |= {
        "free_bytes": room and room.f_bavail * room.f_frsize,
        "total_bytes": room and room.f_blocks * room.f_frsize,
        # File systems that create inodes on demand (btrfs) report 0 of 0.
        "free_inodes": room.f_favail if room and room.f_files else None,
    }
    found["trouble"] = trouble and {"operation": trouble[0], "error": _name(trouble[1])}
    return found


def file_system(directory: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return type, source, mount point and options of the file system of a directory, None if unknown."""
    return _mount(os.path.realpath(directory), _text(Path("/proc/self/mountinfo")) or "")


def _mount(path: str, mountinfo: str) -> dict[str, str | None]:
    """Return type, source, mount point and options of the mount that contains ``path`` (proc_pid_mountinfo(5))."""
    found: dict[str, str | None] = dict.fromkeys(("type", "source", "mount", "options"))
    longest = -1
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, of = before.split(), after.split()
        if not separator or len(fields) < 6 or len(of) < 2:  # noqa: PLR2004 - the fields before the optional ones
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        # A later mount on the same point covers the earlier one.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            longest = len(point)
            options = ",".join(dict.fromkeys([*fields[5].split(","), *("".join(of[2:3])).split(",")]).keys())
            found = {"type": of[0], "source": of[1], "mount": point, "options": options.rstrip(",")}
    return found


def _io(files: Any) -> dict[str, Any] | None:
    if files is None:
        return None
    memory, offset = files.direct_alignment or (None, None)
    return {
        **{key: _name(answer) for key, answer in _pick(files, *_ANSWERS).items()},
        **_pick(files, "direct_used", "direct_bypasses", "lock_reach"),
        "memory_alignment": memory,
        "offset_alignment": offset,
    }


_ANSWERS = (
    *("direct_open", "direct_write", "direct_read", "cachestat", "uncached", "fallocate", "reflink"),
    *("rename_exchange", "lock"),
)


def _pick(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _counters(needed: int, places: Sequence[tuple[str, str | None]], root: Path) -> dict[str, Any]:
    """The first directory that accepts the live counters and has room (docs/telemetry.md), or else the first one."""
    found = [_counters_at(needed, Path(path), refused, root) for path, refused in places]
    room = (one for one in found if one["writable"] and (one["free_bytes"] is None or one["free_bytes"] >= needed))
    return next(room, found[0])


def _counters_at(needed: int, directory: Path, refused: str | None, root: Path) -> dict[str, Any]:
    writable, free = False, None
    # Like a save, do not access a refused directory, which might block without end.
    if refused is None:
        there = directory if directory.exists() else directory.parent
        writable = os.access(there, os.W_OK | os.X_OK)
        with contextlib.suppress(OSError):
            room = os.statvfs(there)
            free = room.f_bavail * room.f_frsize
    return {
        "off": os.environ.get("FASTCKPT_TOP") == "0",
        "directory": str(directory),
        "type": _mount(os.path.abspath(directory), _text(root / "proc/self/mountinfo") or "")["type"],  # noqa: PTH100
        "refused": refused,
        "writable": writable,
        "free_bytes": free,
        "needed_bytes": needed,
    }


def _versions() -> dict[str, str | None]:
    return {
        "fastckpt": fastckpt.__version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "torch_cuda": _torch_cuda(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, or None. Read without an import, which takes seconds."""
    spec = None
    with contextlib.suppress(ValueError, ImportError):
        spec = importlib.util.find_spec("torch")
    text = _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else None
    built = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text or "", re.MULTILINE)
    return built[1] if built else None
