"""Kills a run within its saves, its removals and its restore, and looks after each kill at what is there.

    python tests/manager/kill_campaign.py --kills 2000 DIRECTORY

A child forked for each round restores, saves and removes as fast as it can with ``keep=1``, and tells its parent when
it begins a phase and which step is durable. The parent kills it at a random time after the beginning of a phase. After
each kill another child must be able to restore, without a warning, the newest step that was acknowledged or a later
one, bit for bit. The oracle, the acknowledged step, is the parent's alone. It prints one JSON document; its exit status
is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import sys
import time
import traceback
import warnings

import numpy as np

import fastckpt
from fastckpt._manager import manager, retention

PHASES = ("restore", "save", "retention")
#: What the child tells: a phase begins, or a step is durable.
MESSAGE = struct.Struct("=Bq")
ACKNOWLEDGED = len(PHASES)
#: The longest time from the beginning of a phase to the kill, in seconds.
LONGEST = 0.012


def state(step):
    """Several files, each of which says of which step it is."""
    return {"model": {f"w{index}": np.full(20_000, step + index) for index in range(4)}, "step": step}


def train(directory, tell, asynchronous):
    """Restore, save and remove for ever."""
    clear = retention.Retention.clear

    def told(self, durable):
        tell(PHASES.index("retention"), durable)
        clear(self, durable)

    retention.Retention.clear = told
    run = manager.Manager(directory, keep=1, async_save=asynchronous, save_options={"shard_size": 160_000})
    tell(PHASES.index("restore"), 0)
    found = run.restore()
    step = found.step if found else 0
    while True:
        step += 1
        tell(PHASES.index("save"), step)
        run.save(step, state(step))
        if step % 2:
            run._pending and run._pending.result()
            tell(ACKNOWLEDGED, step)


def check(directory, acknowledged):
    """Restore; what is wrong, or nothing."""
    warnings.simplefilter("error")
    found = fastckpt.Manager(directory, read_only=True).restore()
    if found is None:
        return "" if acknowledged == 0 else f"step {acknowledged} was acknowledged, and nothing is there"
    if found.step < acknowledged:
        return f"step {acknowledged} was acknowledged, and the newest is {found.step}"
    expected = state(found.step)
    if found.state["step"] != found.step or any(
        not np.array_equal(found.state["model"][name], value) for name, value in expected["model"].items()
    ):
        return f"step {found.step} is not what was saved"
    # What a kill leaves of the small files is swept after a minute.
    entries = [name for name in os.listdir(directory) if not name.endswith(".new")]  # noqa: PTH208 - names are enough
    return "" if len(entries) < 20 else f"leftovers pile up: {entries}"


def in_child(work):
    """Fork; the child does ``work`` and ends. Returns its pid and what it writes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        work(writing)
        status = 0
    except BaseException:  # noqa: BLE001 - it ends here whatever it is
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def one_round(directory, acknowledged, seed):
    """Train and kill; the phase, and the newest step that was acknowledged."""
    asynchronous, phase = seed.random() < 0.7, seed.choice(PHASES)
    after, delay = seed.randrange(1, 4) if phase != "restore" else 1, seed.uniform(0, LONGEST)
    pid, pipe = in_child(
        lambda writing: train(directory, lambda *what: os.write(writing, MESSAGE.pack(*what)), asynchronous)
    )
    try:
        while after:
            message = os.read(pipe, MESSAGE.size)
            if len(message) < MESSAGE.size:
                raise RuntimeError("the child ended by itself")
            kind, step = MESSAGE.unpack(message)
            if kind == ACKNOWLEDGED:
                acknowledged = step
            elif PHASES[kind] == phase:
                after -= 1
        time.sleep(delay)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # What it told before it died is acknowledged, too.
    while len(message := os.read(pipe, MESSAGE.size)) == MESSAGE.size:
        kind, step = MESSAGE.unpack(message)
        if kind == ACKNOWLEDGED:
            acknowledged = step
    os.close(pipe)
    return phase, acknowledged


def campaign(directory, kills, seed):
    """All rounds; what came of them."""
    counts, violations, acknowledged = dict.fromkeys(PHASES, 0), [], 0
    draw = random.Random(seed)
    for number in range(kills):
        phase, acknowledged = one_round(directory, acknowledged, draw)
        counts[phase] += 1
        before = acknowledged
        pid, pipe = in_child(lambda writing, least=before: os.write(writing, check(directory, least).encode()))
        with os.fdopen(pipe, encoding="utf-8") as file:
            wrong = file.read()
        if os.waitpid(pid, 0)[1] != 0:
            wrong = wrong or "the restore failed"
        if wrong:
            violations.append(f"kill {number} within {phase}: {wrong}")
            if len(violations) >= 10:
                break
    return {"kills": counts, "seed": seed, "newest_acknowledged": acknowledged, "violations": violations}


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description="Kill a run within saves, removals and restores.")
    parser.add_argument("directory")
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done = campaign(options.directory, options.kills, options.seed)
    print(json.dumps(done))
    return 1 if done["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
