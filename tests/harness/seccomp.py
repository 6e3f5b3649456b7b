"""Make io_uring_setup answer an error, with a real seccomp filter, as Docker's default profile does.

As a program: ``python -m harness.seccomp EPERM -- command ...``. In a process: ``install("ENOSYS")``.
The filter is inherited by threads and children and can never be taken off again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO = 0x0005_0000
SECCOMP_RET_ALLOW = 0x7FFF_0000
BPF_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
BPF_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
BPF_RETURN = 0x06  # BPF_RET | BPF_K
IO_URING_SETUP = 425  # the same number on every architecture: it is younger than the common table
# Offsets in struct seccomp_data: the call's number, and the architecture.
NUMBER, ARCH = 0, 4
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}


class SockFprog(ctypes.Structure):
    """``struct sock_fprog``: what prctl takes."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _statement(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def program(error: int) -> bytes:
    """A filter that answers ``error`` to io_uring_setup and allows everything else."""
    return b"".join(
        (
            _statement(BPF_LOAD_WORD, 0, 0, ARCH),
            _statement(BPF_JUMP_EQUAL, 0, 3, AUDIT_ARCH[platform.machine()]),
            _statement(BPF_LOAD_WORD, 0, 0, NUMBER),
            _statement(BPF_JUMP_EQUAL, 0, 1, IO_URING_SETUP),
            _statement(BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | error),
            _statement(BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW),
        )
    )


def install(name: str) -> None:
    """From now on io_uring_setup answers the error ``name`` in this process and its children."""
    code = program(getattr(errno, name))
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
