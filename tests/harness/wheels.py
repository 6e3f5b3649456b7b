"""Wheels that a test writes, and environments for them, without an index or network."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import fastckpt

_TREE = Path(fastckpt.__file__).parent
_ROOT = Path(__file__).parents[2]


def write(directory: Path, name: str, version: str, files: dict[str, bytes | Path], commands: str = "") -> Path:
    """Write a wheel for any Python; ``files``: bytes or source paths, by path in site-packages."""
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    whole: dict[str, bytes] = {to: data if isinstance(data, bytes) else data.read_bytes() for to, data in files.items()}
    whole[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    whole[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if commands:
        whole[f"{about}/entry_points.txt"] = f"[console_scripts]\n{commands}\n".encode()
    record = "".join(f"{to},sha256={_sum(data)},{len(data)}\n" for to, data in whole.items())
    path = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for to, data in whole.items():
            archive.writestr(to, data)
        archive.writestr(f"{about}/RECORD", f"{record}{about}/RECORD,,\n")
    return path


def _sum(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def of_the_installed_package(directory: Path) -> Path:
    """Write a wheel of the tested fastckpt, with its files, name and command."""
    files: dict[str, bytes | Path] = {
        f"fastckpt/{path.relative_to(_TREE).as_posix()}": path
        for path in sorted(_TREE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    (script,) = re.findall(
        r'^\[project.scripts\]\nfastckpt = "(.+)"$',
        (_ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return write(directory, "fastckpt-io", fastckpt.__version__, files, f"fastckpt = {script}")


class Environment:
    """A virtual environment with each of ``packages`` from its directory, and with no other packages."""

    def __init__(self, directory: Path, wheels: Path, packages: list[Path]) -> None:
        self.bin = directory / "bin"
        self._wheels = wheels
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", directory], check=True, capture_output=True, timeout=120
        )
        borrowed = directory / "borrowed"
        borrowed.mkdir()
        for package in packages:
            (borrowed / package.name).symlink_to(package)
        (self.site,) = directory.glob("lib/python*/site-packages")
        (self.site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")

    def pip(self, *arguments: str) -> str:
        """Run pip in this environment, with only the given wheels; return its output of both streams."""
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        if "install" in arguments:
            command += ["--no-index", "--no-deps", "--no-compile", "--find-links", str(self._wheels)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def run(self, command: str, *arguments: str, status: int = 0, **variables: str) -> tuple[str, str]:
        """Run a command of this environment; return its output and its error output."""
        done = subprocess.run(
            [self.bin / command, *arguments],
            env={**{name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}, **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr
