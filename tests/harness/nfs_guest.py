"""The program inside the user-mode Linux (see :mod:`harness.nfs`): runs a module's scenarios, each in a directory."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from harness import machines, nfs, zygote


class Pair:
    """Two machines: ``node-a`` and ``node-b``, or two with the same name."""

    def __init__(self, logs: Path, host: str) -> None:
        self.logs, self.names = logs, [host, host] if host else ["node-a", "node-b"]
        self.children = self._start()

    def _start(self) -> list[zygote.Zygote]:
        self.running = contextlib.ExitStack()
        return [self.running.enter_context(machines.machine(self.logs, name)) for name in self.names]

    def replace(self) -> None:
        """Replace the machines: a failed scenario may have left a process that does not answer."""
        with contextlib.suppress(Exception):
            self.running.close()
        self.children = self._start()


def main(module: str, names: list[str]) -> None:
    scenarios = importlib.import_module(module)
    logs = Path(tempfile.mkdtemp())
    pairs = {host: Pair(logs, host) for host in sorted({name.rpartition(":")[0] for name in names})}
    for name in names:
        began = time.monotonic()
        host, _, scenario = name.rpartition(":")
        failed = None
        try:
            directories = [client / name.replace(":", "-") for client in nfs.CLIENTS]
            directories[0].mkdir()
            # The other client's cache may lack the directory for a while.
            machines.wait_until(directories[1].is_dir)
            getattr(scenarios, scenario)(*zip(pairs[host].children, directories, strict=True), logs)
        except BaseException:  # noqa: BLE001 - whatever it was, the test outside is told
            failed = traceback.format_exc()
            pairs[host].replace()
        say({"scenario": name, "seconds": round(time.monotonic() - began, 1), "failed": failed})
    say({"end": True})


def say(result: dict[str, Any]) -> None:
    with (nfs.OUT / "results").open("a", encoding="utf-8") as results:
        print(json.dumps(result), file=results)


if __name__ == "__main__":
    # No scenario needs the monitor's counters.
    os.environ["FASTCKPT_TOP"] = "0"
    main(sys.argv[1], sys.argv[2:])
