"""Make io_uring_setup answer an error, with a real seccomp filter, as Docker's default profile does.

As a program: ``python -m harness.seccomp EPERM -- command ...``. In a process: ``install("ENOSYS")``. ``EPERM:all``
refuses the two other calls of io_uring as well, as the profiles of containers do.
The filter is inherited by threads and children and can never be taken off again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO = 0x0005_0000
SECCOMP_RET_ALLOW = 0x7FFF_0000
BPF_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
BPF_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
BPF_RETURN = 0x06  # BPF_RET | BPF_K
# The same numbers on every architecture: they are younger than the common table.
IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
# Offsets in struct seccomp_data: the call's number, and the architecture.
NUMBER, ARCH = 0, 4
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}


class SockFprog(ctypes.Structure):
    """``struct sock_fprog``: what prctl takes."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _statement(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def program(error: int, calls: Sequence[int] = (IO_URING_SETUP,)) -> bytes:
    """A filter that answers ``error`` to the calls and allows everything else."""
    last = len(calls)
    return b"".join(
        (
            _statement(BPF_LOAD_WORD, 0, 0, ARCH),
            _statement(BPF_JUMP_EQUAL, 0, last + 1, AUDIT_ARCH[platform.machine()]),
            _statement(BPF_LOAD_WORD, 0, 0, NUMBER),
            *(_statement(BPF_JUMP_EQUAL, last - at, 0, call) for at, call in enumerate(calls)),
            _statement(BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW),
            _statement(BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | error),
        )
    )


def install(name: str) -> None:
    """From now on io_uring_setup answers the error ``name`` in this process and its children."""
    name, _, which = name.partition(":")
    calls = (IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER) if which == "all" else (IO_URING_SETUP,)
    code = program(getattr(errno, name), calls)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    argument = SockFprog(len(code) // 8, code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def setup_errno() -> int:
    """What io_uring_setup answers right now: 0 when a ring can be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(120)
    ring = libc.syscall(IO_URING_SETUP, 4, params)
    if ring < 0:
        return ctypes.get_errno()
    os.close(ring)
    return 0


def main() -> None:
    name, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        raise SystemExit("usage: python -m harness.seccomp EPERM|ENOSYS -- command ...")
    install(name)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
