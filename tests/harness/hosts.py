"""Two hosts on one machine: network namespaces joined by a cable, each with its own host name. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003
from typing import Any

from harness import groups, needs

NAMES = ("node-a", "node-b")
_numbers = itertools.count()
ADDRESSES = ("10.213.7.1", "10.213.7.2")


@dataclass
class Hosts:
    """A forge on each host. The store of a job is on the first host."""

    forges: tuple[groups.Forge, groups.Forge]

    def group(self, size: int, **options: Any) -> contextlib.AbstractContextManager[groups.Group]:
        """A group with the first half of its ranks on the first host and the rest on the second."""
        chosen = [self.forges[rank * 2 // size].zygote for rank in range(size)]
        return self.forges[0].group(size, zygotes=chosen, host=ADDRESSES[0], **options)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr}")


@contextlib.contextmanager
def two(hidden: Path | None = None) -> Iterator[Hosts]:
    """Two hosts for the ``with`` statement. They share all files except ``hidden``, for which the second host has its
    own empty directory."""
    needs.network_namespaces()
    number = next(_numbers)
    spaces = [f"fastckpt-{os.getpid()}-{number}-{name}" for name in NAMES]
    with contextlib.ExitStack() as undo:
        for space in spaces:
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "del", space)
        _ip("link", "add", "eth0", "netns", spaces[0], "type", "veth", "peer", "name", "eth0", "netns", spaces[1])
        forges = []
        for index, (space, name, address) in enumerate(zip(spaces, NAMES, ADDRESSES, strict=True)):
            _ip("-n", space, "addr", "add", f"{address}/30", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            hide = f"mount -t tmpfs none '{hidden}' && " if index and hidden is not None else ""
            script = f'echo {name} >/proc/sys/kernel/hostname && {hide}exec "$@"'
            prefix = ("ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", script, "sh")
            # In a cluster, a host's name resolves to its address; here, gloo gets the network interface instead.
            forges.append(undo.enter_context(groups.forge(*prefix, env={"GLOO_SOCKET_IFNAME": "eth0"})))
        yield Hosts((forges[0], forges[1]))
