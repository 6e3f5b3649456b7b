"""A container like that of a training image: its own namespaces (no network at all), a read-only root, a home
on an overlay, an ordinary user without capabilities, Docker's seccomp rule for io_uring, little locked memory, a small
/dev/shm, and control groups that limit memory and CPU. Needs root, and no container runtime.

:func:`running` makes a container, ``exec`` and ``start`` run programs in it, and ``kill`` ends everything inside by
SIGKILL, like ``docker kill`` and the eviction of a pod.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import machines, needs, seccomp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GIB, MIB = 1 << 30, 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
INIT = Path(__file__).with_name("container_init.py")
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
#: An arbitrary user id, as in some images. The limit of locked memory holds for a user on the whole machine,
#: so each process that runs tests uses its own id.
USER = 40_000 + os.getpid() % 20_000

# Starts in the container as root, then runs the program as the container's user.
_CONFINE = """
import base64, ctypes, json, os, resource, sys
spec, command = json.loads(sys.argv[1]), sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
def prctl(*arguments):
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {arguments}")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (spec["memlock"], spec["memlock"]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for capability in range(64):
    if libc.prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
        break
os.setgroups([])
os.setresgid(spec["user"], spec["user"], spec["user"])
os.setresuid(spec["user"], spec["user"], spec["user"])
prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
os.chdir(spec["directory"])
os.umask(0o022)
if spec["seccomp"]:
    code = base64.b64decode(spec["seccomp"])
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
    program = Program(len(code) // 8, code)
    prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execvpe(command[0], command, spec["env"])
"""


@dataclass
class Spec:
    """The description of a container."""

    #: The root file system; read-only inside.
    root: Path
    #: The layers below the home directory, the topmost first.
    home: Sequence[Path] = ()
    #: The directory for writes to the home directory; by default, a directory that is removed with the container.
    upper: Path | None = None
    host: str = "trainer-0"
    #: Directories of the host by their paths in the container: ``{"/checkpoints": path}``.
    volumes: Mapping[str, Path] = field(default_factory=dict)
    #: The ``volumes`` that are mounted read-only.
    read_only: Sequence[str] = ()
    #: Bytes of /dev/shm.
    shm: int = 64 * MIB
    #: A limit for the memory of all processes together, in bytes.
    memory: int = GIB
    cpus: float = 1.5
    memlock: int = 64 << 10
    #: A BPF program: see :mod:`harness.seccomp`.
    seccomp: bytes = field(default_factory=lambda: seccomp.program(errno.EPERM, seccomp.CALLS))
    env: Mapping[str, str] = field(default_factory=dict)
    user: int = USER


class Container:
    """A running container."""

    def __init__(
        self, spec: Spec, init: int, groups: _Groups, upper: Path, entered: subprocess.Popen[str], pidfd: int
    ) -> None:
        self.spec = spec
        #: The pid on the host of the container's process 1.
        self.init = init
        #: The directory with the writes to the home directory.
        self.upper = upper
        self.groups = groups
        self._entered = entered
        self._pidfd = pidfd
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a program as the container's user."""
        spec = {
            "memlock": self.spec.memlock,
            "user": self.spec.user,
            "directory": "/home",
            "seccomp": base64.b64encode(options.pop("seccomp", self.spec.seccomp)).decode(),
            "env": {
                "PATH": "/home/.local/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": "/home",
                "LANG": "C.UTF-8",
                **self.spec.env,
                **(env or {}),
            },
        }
        enter = ["nsenter", "--target", str(self.init), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--"]
        python = "/usr/local/bin/python3" if (self.spec.root / "usr/local/bin/python3").exists() else "/usr/bin/python3"
        confined = [python, "-I", "-S", "-c", _CONFINE, json.dumps(spec), *command]
        pipe = subprocess.PIPE
        # The process joins the control groups first: its cgroup namespace then has these groups as its root.
        started = subprocess.Popen(
            [*self.groups.enter(), *enter, *confined], stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options
        )
        self._started.append(started)
        return started

    def exec(self, *command: str, seconds: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        started = self.start(*command, **options)
        out, err = started.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, started.returncode, out, err)

    def python(self, program: str, *arguments: str, **options: Any) -> str:
        """Run a Python program, which must succeed, and return its output."""
        done = self.exec("python3", "-c", program, *arguments, **options)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
        return done.stdout

    def kill(self) -> None:
        """Kill everything inside by SIGKILL, and return when all processes have ended."""
        # The death of unshare ends process 1. If process 1 ended first, unshare would print an error.
        self._entered.kill()
        self._entered.wait(60)
        ended, _, _ = select.select([self._pidfd], [], [], 60)
        assert ended, f"process 1 of the container (pid {self.init} here) still runs 60 seconds after SIGKILL"
        for started in self._started:
            started.wait(60)
            for stream in (started.stdin, started.stdout, started.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


@contextlib.contextmanager
def running(spec: Spec) -> Iterator[Container]:
    """A container for the duration of the ``with`` statement."""
    needs.root()
    for program in ("unshare", "nsenter", "mount"):
        needs.tool(program, "util-linux" if program != "mount" else "mount")
    with contextlib.ExitStack() as made:
        base = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="fastckpt-container-")))
        base.chmod(0o755)  # so that the container's user can enter it
        parts = {part: base / part for part in ("root", "home", "upper", "work")}
        for directory in parts.values():
            directory.mkdir(mode=0o755)
        if spec.upper is not None:
            parts["upper"] = spec.upper
            # The directory is on the file system of `upper`, as overlayfs requires.
            parts["work"] = Path(made.enter_context(tempfile.TemporaryDirectory(dir=spec.upper.parent)))
        for part in ("home", "upper"):
            os.chown(parts[part], spec.user, spec.user)
        groups = made.enter_context(control_groups(spec))
        told = {
            "root": str(spec.root),
            "at": str(parts["root"]),
            # An overlay needs at least one lower layer.
            "lower": ":".join(str(layer) for layer in (*spec.home, parts["home"])),
            "upper": str(parts["upper"]),
            "work": str(parts["work"]),
            "host": spec.host,
            "volumes": {where: str(what) for where, what in spec.volumes.items()},
            "read_only": list(spec.read_only),
            "shm": spec.shm,
            "groups": groups.mounts(),
        }
        # The kernel kills everything inside when process 1 ends, and unshare ends process 1 when it is killed itself.
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", sys.executable, "-I", str(INIT), json.dumps(told)]
        entered = subprocess.Popen([*groups.enter(), *command], stdout=subprocess.PIPE, text=True)
        assert entered.stdout is not None
        with entered.stdout:
            ready = entered.stdout.readline()
        assert ready == "ready\n", f"the container did not start: exit status {entered.wait(60)}"
        [init] = Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text(encoding="ascii").split()
        pidfd = os.pidfd_open(int(init))
        made.callback(os.close, pidfd)
        container = Container(spec, int(init), groups, parts["upper"], entered, pidfd)
        try:
            yield container
        finally:
            container.kill()


class _Groups:
    """The control groups of a container: their directories by controller, for cgroup version 1 or 2."""

    def __init__(self, directories: Mapping[str, Path], version: int) -> None:
        self.directories, self.version = directories, version

    def enter(self) -> list[str]:
        """The command prefix that runs a program in these groups."""
        procs = [str(directory / "cgroup.procs") for directory in dict.fromkeys(self.directories.values())]
        write = "".join(f'echo $$ > "{file}"; ' for file in procs)
        return ["sh", "-c", f'set -e; {write}exec "$@"', "sh"]

    def mounts(self) -> list[tuple[str, str, str]]:
        """Type, options and place of the mount that shows the groups inside the container."""
        if self.version == 2:
            return [("cgroup2", "ro", "")]
        return [("cgroup", f"ro,{name}", name) for name in self.directories]

    def number(self, version_1: str, version_2: str) -> int:
        """The value of a file of the memory controller."""
        name = version_2 if self.version == 2 else version_1
        file, _, key = name.partition(":")
        text = (self.directories["memory"] / file).read_text(encoding="ascii")
        return int(dict(line.split() for line in text.splitlines())[key] if key else text)

    @property
    def killed(self) -> int:
        """How many processes the kernel killed because memory ran out."""
        return self.number("memory.oom_control:oom_kill", "memory.events:oom_kill")


@contextlib.contextmanager
def control_groups(spec: Spec) -> Iterator[_Groups]:
    name = f"fastckpt-test-{os.getpid()}-{os.urandom(4).hex()}"
    controllers = CGROUPS / "cgroup.controllers"
    if controllers.exists():
        if not {"memory", "cpu"} <= set(controllers.read_text(encoding="ascii").split()):
            needs.missing("needs the controllers memory and cpu of cgroup v2 at /sys/fs/cgroup")
        try:
            (CGROUPS / "cgroup.subtree_control").write_text("+memory +cpu", encoding="ascii")
        except OSError as error:  # as in a container, whose root group has processes
            needs.missing(f"needs to give the controllers memory and cpu to groups below {CGROUPS}: {error}")
        version, directories = 2, dict.fromkeys(("memory", "cpu"), CGROUPS / name)
        limits = {"memory": {"memory.max": spec.memory}, "cpu": {"cpu.max": f"{int(spec.cpus * 100_000)} 100000"}}
    else:
        version, directories = 1, {controller: CGROUPS / controller / name for controller in ("memory", "cpu")}
        limits = {
            "memory": {"memory.limit_in_bytes": spec.memory},
            "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": int(spec.cpus * 100_000)},
        }
        for directory in directories.values():
            if not (directory.parent / "cgroup.procs").exists():
                needs.missing(f"needs a control group hierarchy at {directory.parent}, or cgroup v2 at {CGROUPS}")
    with contextlib.ExitStack() as made:
        for directory in dict.fromkeys(directories.values()):
            directory.mkdir()
            made.callback(_remove, directory)
            directory.chmod(0o755)  # despite the umask, so that programs inside can read their limits
        for controller, files in limits.items():
            for file, value in files.items():
                (directories[controller] / file).write_text(str(value), encoding="ascii")
        yield _Groups(directories, version)


def _remove(directory: Path) -> None:
    """Remove a control group. Killed processes may take a moment to leave it."""

    def gone() -> bool:
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    machines.wait_until(gone)
