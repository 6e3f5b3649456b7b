"""A simulated second machine: its own host name, boot id and processes, on the same kernel."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import needs, strace, zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

# `sh -c` takes the host's name as $0, a file with the boot id as $1 ("-": the real boot id), then the command.
_ENTER = """
echo "$0" > /proc/sys/kernel/hostname
[ "$1" = - ] || mount --bind "$1" /proc/sys/kernel/random/boot_id
shift
exec "$@"
"""


def command(host: str, boot: str = "-", *, pids: bool = True) -> list[str]:
    """The command prefix that runs a program on a machine called ``host``, with the boot id in the file ``boot``."""
    apart = ["--pid", "--fork", "--kill-child", "--mount-proc"] if pids else []
    return ["unshare", "--uts", "--mount", *apart, "sh", "-c", _ENTER, host, boot]


@contextlib.contextmanager
def machine(directory: Path, host: str, *, boot: bool = True, pids: bool = True) -> Iterator[zygote.Zygote]:
    """Children on a machine of that name; ``boot`` gives it its own boot id, and ``pids`` a PID namespace."""
    needs.root()
    given = "-"
    if boot:
        given = str(directory / f"boot-{uuid.uuid4()}")
        Path(given).write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    # The monitor's counters would add system calls to those at which savers are stopped.
    with zygote.running(*command(host, given, pids=pids), env={"FASTCKPT_TOP": "0"}) as children:
        yield children


@contextlib.contextmanager
def stopped_save(
    children: zygote.Zygote,
    path: Path,
    log: Path,
    call: str,
    when: int = 1,
    *inject: str,
    at: Path | None = None,
    **options: Any,
) -> Iterator[zygote.Child]:
    """A save that is stopped before its ``when``-th ``call`` (of those that name ``at``) during the ``with`` statement.
    The save continues afterwards, unless its process was killed."""
    options = {"index": 1, "nbytes": 1 << 18, "threads": 1, **options}
    child = children.start("save_held", path=str(path), **options)
    child.next(60)
    with strace.stopping(child.pid, log, call, when, *inject, path=at) as stop:
        child.go()
        stop.wait()
        yield child


def wait_until(what: Any, seconds: float = 60.0) -> None:
    """Wait until ``what()`` is true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the awaited condition did not become true"
        time.sleep(0.01)
