"""The first process of a user-mode Linux: starts an NFSv4.2 server, two clients, and a program that uses both.

    init.py UML OUT

``UML`` is the directory of ``fetch``. ``OUT`` is a directory of the host, where ``program`` has the command (JSON) and
the log is written.
Uses only the standard library, because nothing is set up yet. At the end it switches the machine off.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

FINIT_MODULE = 313  # on x86-64, the only architecture here with a user-mode Linux
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
# The order matters: each module needs the modules before it.
MODULES = [
    *("net/sunrpc/sunrpc", "fs/nfs_common/grace", "fs/lockd/lockd", "fs/nfs_common/nfs_acl", "lib/oid_registry"),
    *("net/sunrpc/auth_gss/auth_rpcgss", "fs/nfsd/nfsd", "fs/netfs/netfs", "fs/fscache/fscache", "fs/nfs/nfs"),
    *("net/dns_resolver/dns_resolver", "fs/nfs/nfsv4"),
]
CLIENTS = ("a", "b")


def run(*command: str, **options: object) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


def mount(kind: str, where: str, *, source: str = "none", options: str = "rw") -> None:
    Path(where).mkdir(parents=True, exist_ok=True)
    run("mount", "-i", "-t", kind, "-o", options, source, where)


def load_modules(uml: Path) -> None:
    kernel = next((uml / "usr/lib/uml/modules").iterdir()) / "kernel"
    libc = ctypes.CDLL(None, use_errno=True)
    for module in MODULES:
        descriptor = os.open(kernel / f"{module}.ko", os.O_RDONLY)
        if libc.syscall(FINIT_MODULE, descriptor, b"", 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot load {module}")
        os.close(descriptor)


def serve(uml: Path) -> None:
    """Export the disk by NFSv4.2 on the loopback."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    mount("ext4", "/run/disk", source="/dev/ubda")
    Path("/run/disk/shared").mkdir()
    Path("/run/disk/lost+found").rmdir()
    mount("tmpfs", "/var/lib")
    for directory in ("v4recovery", "rpc_pipefs", "sm"):
        Path("/var/lib/nfs", directory).mkdir(parents=True)
    for file in ("etab", "rmtab", "state"):
        Path("/var/lib/nfs", file).touch()
    mount("rpc_pipefs", "/var/lib/nfs/rpc_pipefs")
    mount("nfsd", "/proc/fs/nfsd")
    # A new server waits for clients of its predecessor; the shortest times are set.
    for setting in ("nfsv4gracetime", "nfsv4leasetime"):
        Path("/proc/fs/nfsd", setting).write_text("10", encoding="ascii")
    programs = uml / "usr/sbin"
    libraries = [str(uml / place / "x86_64-linux-gnu") for place in ("usr/lib", "lib")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    options = "rw,no_root_squash,fsid=0,insecure,no_subtree_check"
    run(str(programs / "exportfs"), "-i", "-o", options, "*:/run/disk/shared", env=environment)
    subprocess.Popen([programs / "rpc.mountd", "-N", "2", "-N", "3", "-F"], env=environment)
    run(str(programs / "rpc.nfsd"), "-N", "3", "-V", "4", "4", env=environment)
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y", encoding="ascii")


def connect() -> None:
    """Make two mounts that share neither a cache nor, because of their identifiers, a client name."""
    for number, client in enumerate(CLIENTS, start=1):
        Path("/sys/fs/nfs/net/nfs_client/identifier").write_text(f"client {client}", encoding="ascii")
        address = f"127.0.0.{number}"
        options = f"vers=4.2,nosharecache,addr={address},clientaddr=127.0.0.1"
        deadline = time.monotonic() + 30
        while True:
            try:
                mount("nfs4", f"/run/{client}", source=f"{address}:/", options=options)
                break
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
    clients = len(list(Path("/proc/fs/nfsd/clients").iterdir()))
    if clients != len(CLIENTS):
        raise RuntimeError(f"the server knows {clients} clients, not {len(CLIENTS)}")


def main(uml: Path, out: str) -> None:
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    mount("proc", "/proc")
    mount("sysfs", "/sys")
    mount("tmpfs", "/run")
    # /tmp stays visible, because the program may be there.
    Path("/run/tmp").mkdir()
    os.environ["TMPDIR"] = "/run/tmp"
    mount("tmpfs", "/dev/shm")
    mount("hostfs", "/run/out", options=out)
    log = os.open("/run/out/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    load_modules(uml)
    serve(uml)
    connect()
    program = json.loads(Path("/run/out/program").read_text(encoding="utf-8"))
    child = subprocess.Popen([sys.executable, *program])
    # The first process inherits all orphans, and reaps them.
    while os.waitpid(-1, 0)[0] != child.pid:
        pass


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # If the first process ended, the kernel would panic.
        os.sync()
        Path("/proc/sysrq-trigger").write_text("o", encoding="ascii")
        time.sleep(60)
