"""Make io_uring_setup return an error, with a real seccomp filter, like Docker's default profile.

Run ``python -m harness.seccomp EPERM -- command ...``, or call ``install("ENOSYS")`` in a process. ``EPERM:all``
also refuses the two other calls of io_uring, like the profiles of containers; ``ENOSYS:statx`` refuses only statx,
like older profiles. An error can be replaced by the path of a JSON profile for container runtimes.
Threads and children inherit the filter, and nothing can remove it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
# These calls have the same numbers on every architecture, because they are newer than the common table.
CALLS = IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
STATX = {"x86_64": 332, "aarch64": 291}
# Offsets in struct seccomp_data: the call's number, and the architecture.
NUMBER, ARCH = 0, 4
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}


class SockFprog(ctypes.Structure):
    """``struct sock_fprog``: the argument of prctl."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _statement(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def program(error: int, calls: Sequence[int] = (IO_URING_SETUP,)) -> bytes:
    """A filter that returns ``error`` for the calls and allows everything else."""
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
    """Make io_uring_setup return the error ``name`` in this process and its children from now on."""
    name, _, which = name.partition(":")
    calls = {"all": CALLS, "statx": (STATX[platform.machine()],)}.get(which, (IO_URING_SETUP,))
    load(program(getattr(errno, name), calls))


def load(code: bytes) -> None:
    """Put this process and its children under a filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    argument = SockFprog(len(code) // 8, code)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


#: libseccomp's numbers for the actions that profiles name.
_ALLOW, _ERRNO, _LOG = 0x7FFF_0000, 0x0005_0000, 0x7FFC_0000
_COMPARE = {"NE": 1, "LT": 2, "LE": 3, "EQ": 4, "GE": 5, "GT": 6, "MASKED_EQ": 7}


class _Argument(ctypes.Structure):
    """``struct scmp_arg_cmp``: a condition on an argument of a call."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def profile(path: Path) -> bytes:
    """The filter of a JSON profile, made by libseccomp as container runtimes make it.

    As in runtimes, names that libseccomp does not know are ignored: profiles may be older or newer than the machine.
    """
    told = json.loads(path.read_text(encoding="utf-8"))
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        from harness import needs

        needs.missing("needs libseccomp (apt-get install libseccomp2)")
        raise
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_release.restype = None

    def action(rule: Any, name: str, number: str) -> int:
        kind = rule[name].removeprefix("SCMP_ACT_")
        return {"ALLOW": _ALLOW, "LOG": _LOG, "ERRNO": _ERRNO | rule.get(number, errno.EPERM)}[kind]

    def must(answer: int, what: str) -> None:
        if answer < 0:
            raise OSError(-answer, f"libseccomp: {what}: {os.strerror(-answer)}")

    usual = action(told, "defaultAction", "defaultErrnoRet")
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(usual)))
    assert context, "seccomp_init"
    try:
        for name in told["architectures"]:
            token = library.seccomp_arch_resolve_name(name.removeprefix("SCMP_ARCH_").lower().encode())
            assert token, f"libseccomp does not know {name}"
            answer = library.seccomp_arch_add(context, ctypes.c_uint32(token))
            if answer != -errno.EEXIST:  # the filter has the machine's own architecture from the start
                must(answer, name)
        for rule in told["syscalls"]:
            then = action(rule, "action", "errnoRet")
            conditions = [
                _Argument(
                    one["index"], _COMPARE[one["op"].removeprefix("SCMP_CMP_")], one["value"], one.get("valueTwo", 0)
                )
                for one in rule.get("args", ())
            ]
            if then == usual:
                continue
            for name in rule["names"]:
                number = library.seccomp_syscall_resolve_name(name.encode())
                if number == -1:
                    continue
                given = (_Argument * len(conditions))(*conditions)
                answer = library.seccomp_rule_add_array(context, ctypes.c_uint32(then), number, len(given), given)
                must(answer, name)
        with tempfile.TemporaryFile() as file:
            must(library.seccomp_export_bpf(context, file.fileno()), "seccomp_export_bpf")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def setup_errno() -> int:
    """The errno with which io_uring_setup fails now, or 0 if a ring is available."""
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
        raise SystemExit("usage: python -m harness.seccomp EPERM|ENOSYS|PROFILE.json -- command ...")
    if name.endswith(".json"):
        load(profile(Path(name)))
    else:
        install(name)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
