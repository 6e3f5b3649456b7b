"""Root file systems like those of slim training images: pinned Ubuntu packages, unpacked without installation.

``tests/data/root-NAME.txt`` lists the packages with their SHA-256. They are from a release itself, which never changes,
not from its updates, so the list stays valid, and needs no index and no keys. A root is made once and kept
in ``target/roots``, or below FASTCKPT_TEST_ROOTS.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import http.client
import os
import platform
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

ARCHIVE = "http://archive.ubuntu.com/ubuntu/"
#: Seconds before each attempt to download a file.
PAUSES = (0, 1, 5, 20)
TOP = Path(__file__).resolve().parents[2]
LISTS = TOP / "tests" / "data"
#: The mount points of a container, where the root is read-only.
POINTS = ("checkpoints", "dev", "home", "proc", "scratch", "sys", "telemetry", "tmp", "wheels")


def store() -> Path:
    """The directory of the roots."""
    return Path(os.environ.get("FASTCKPT_TEST_ROOTS") or TOP / "target" / "roots")


#: Ubuntu's source package of CPython, for roots that are older than this CPython.
SOURCE = (
    "pool/main/p/python3.10/python3.10_3.10.4.orig.tar.xz",
    "80bf925f571da436b35210886cf79f6eb5fa5d6c571316b73568343451f77a19",
)

BUILD = (
    "umask 022 && rm -rf /tmp/made && cd /tmp/python"
    " && ./configure -q --prefix=/usr/local --with-ensurepip=install --disable-test-modules"
    " && make -s -j $(nproc) && make -s install DESTDIR=/tmp/made"
)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside ``path``, because several processes of a test run need the same root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def root(name: str) -> Path:
    """The root file system ``name``, made if it does not exist: ``oldest``, or one with a list of packages."""
    if name == "oldest":
        return oldest()
    if platform.machine() != "x86_64":
        needs.missing(f"needs x86_64: tests/data/root-{name}.txt lists packages for it")
    needs.tool("dpkg-deb", "dpkg")
    made = store() / name
    listed = (LISTS / f"root-{name}.txt").read_text(encoding="ascii")
    version = hashlib.sha256(listed.encode()).hexdigest()
    mark = made / ".made"
    with locked(made):
        if not mark.exists() or mark.read_text(encoding="ascii") != version:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            made.chmod(0o755)  # despite the umask, so that users can enter it
            with tempfile.TemporaryDirectory(dir=store()) as packages:
                _unpack(listed, Path(packages), made)
            for point in POINTS:
                (made / point).mkdir(exist_ok=True)
                (made / point).chmod(0o755)
            # What the tests need of the packages' installation scripts.
            if not (made / "bin" / "sh").exists():
                (made / "bin" / "sh").symlink_to("dash")
            for name, line in (("passwd", "root:x:0:0:root:/root:/bin/sh"), ("group", "root:x:0:")):
                (made / "etc" / name).write_text(f"{line}\n", encoding="ascii")
                (made / "etc" / name).chmod(0o644)
            mark.write_text(version, encoding="ascii")
    return made


def oldest() -> Path:
    """Ubuntu 18.04 with a CPython 3.10 that its own compiler builds in another root, which takes minutes."""
    made = store() / "oldest"
    mark = made / ".made"
    parts = [(LISTS / f"root-{name}.txt").read_text(encoding="ascii") for name in ("bionic", "bionic-build")]
    version = hashlib.sha256("".join((*parts, *SOURCE, BUILD)).encode()).hexdigest()
    with locked(made):
        if mark.exists() and mark.read_text(encoding="ascii") == version:
            return made
        builder, plain = root("bionic-build"), root("bionic")
        shutil.rmtree(made, ignore_errors=True)
        where = builder / "tmp" / "python"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=store()) as name:
            package = _fetch(*reversed(SOURCE), Path(name))
            subprocess.run(["tar", "-xf", str(package), "-C", str(where), "--strip-components=1"], check=True)
        for name, target in (("awk", "gawk"), ("cc", "gcc")):
            link = builder / "usr" / "bin" / name
            if not link.exists():
                link.symlink_to(target)
        # A compiler needs /dev/null, and ensurepip needs /proc.
        inside = 'mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && exec chroot "$0" sh -c "$1"'
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", inside, str(builder), BUILD]
        path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}
        subprocess.run(command, check=True, env=path, stdout=subprocess.DEVNULL)
        shutil.copytree(plain, made, symlinks=True, ignore=lambda _, names: {".made"} & set(names))
        shutil.copytree(
            builder / "tmp" / "made" / "usr" / "local", made / "usr" / "local", symlinks=True, dirs_exist_ok=True
        )
        shutil.rmtree(builder)
        mark.write_text(version, encoding="ascii")
    return made


def _fetch(digest: str, path: str, into: Path) -> Path:
    """Download a file of the archive, and check it. Failures are retried."""
    url = ARCHIVE + path
    for pause in PAUSES:
        time.sleep(pause)
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            wrong = f"{type(error).__name__}: {error}"
            continue
        if hashlib.sha256(content).hexdigest() == digest:
            file = into / urllib.parse.unquote(Path(path).name)
            file.write_bytes(content)
            return file
        wrong = f"{len(content)} bytes that do not have the SHA-256 of the list, {digest}"
    raise RuntimeError(f"cannot download {url}, tried {len(PAUSES)} times: {wrong}")


def _unpack(listed: str, packages: Path, made: Path) -> None:
    def fetch(line: str) -> Path:
        return _fetch(*line.split(), packages)

    lines = listed.splitlines()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for package in pool.map(fetch, lines):
            subprocess.run(["dpkg-deb", "-x", str(package), str(made)], check=True)
