"""``fastckpt doctor``: the arguments and the screen."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastckpt._text import count, size
from fastckpt._tools.places import path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from . import Diagnosis, Finding

_WIDTH = 110


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "doctor",
        "report how well checkpoints work in a directory",
        "Exits with 0 if all is well, with 1 if there are warnings, with 2 if no checkpoint can be made there.",
    )
    parser.add_argument(
        "path", metavar="DIR", type=path, nargs="?", default=Path(), help="by default the current directory"
    )
    parser.add_argument(
        "--no-probe", action="store_true", help="do not measure (about two seconds of reading and writing)"
    )


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Diagnose; return exit status, JSON document and lines."""
    from . import facts, findings  # noqa: PLC0415 - the parser of every command is made with this file

    # The monitor should not show a trial, and the counters of a process stay for ten minutes after its end.
    found = findings.diagnose(facts.collect(str(options.path), measured=not options.no_probe, counted=False))
    return found.status, found.document(), lines(found)


def lines(found: Diagnosis) -> list[str]:
    """Return the screen: the facts, the findings, the verdict."""
    rows = _rows(found)
    width = max(map(len, rows))
    screen = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    for finding in found.findings:
        screen += ["", *_finding(finding, found.facts["container"])]
    return [*screen, "", found.verdict]


def _finding(finding: Finding, container: str | None) -> list[str]:
    """Return a finding's lines, with the remedies that fit the environment: all of them if it is unknown."""
    head = textwrap.wrap(f"{finding.level}: {finding.text} [{finding.code}]", _WIDTH, subsequent_indent="  ")
    body = [f"  because {reason}" for reason in finding.evidence]
    here = {place: text for place, text in finding.remedies.items() if place in (container, "any")}
    for place, text in (here or finding.remedies).items():
        first, *rest = text.split("\n")
        body += [f"  do ({place}): {first}" if place != "any" else f"  do: {first}"]
        body += [f"    {line}" for line in rest]
    return [*head, *body]


def _rows(found: Diagnosis) -> dict[str, str]:
    """Return the findings, by topic."""
    facts = found.facts
    process, where, memory, cpu = (facts[topic] for topic in ("process", "directory", "memory", "cpu"))
    seccomp = {0: "no seccomp", 1: "strict seccomp", 2: "seccomp filter"}[process["seccomp"]]
    place = facts["kernel"]["sandbox"] or facts["container"] or "no container seen"
    memlock = _bytes(process["memlock"]["soft"], "unlimited") + (" (lifted)" if process["ipc_lock"] else "")
    rows = {
        "kernel": f"Linux {facts['kernel']['release']} {facts['kernel']['machine']}, {place}, {seccomp}",
        "io_uring": _ring(facts["io_uring"]) + f", locked memory {memlock}",
        "engine": f"{found.engine}: {found.why}",
        "directory": f"{where['path']}: {where['type']} ({where['source']} on {where['mount']}), "
        f"{_bytes(where['free_bytes'], '?')} free of {_bytes(where['total_bytes'], '?')}",
    }
    if facts["io"]:
        rows |= _io_rows(facts["io"])
    quota = f", quota {cpu['quota']:g}" if cpu["quota"] else ""
    ranks = f", {cpu['local_world_size']} ranks" if cpu["local_world_size"] else ""
    limit = memory["cgroup_limit_bytes"]
    rows |= {
        "memory": f"{_bytes(memory['available_bytes'], '?')} left"
        f"{f' (limit {_bytes(limit)})' if limit else ''}, transparent huge pages {memory['transparent_huge_pages']}, "
        f"populate {memory['populate']}",
        "cores": f"{cpu['cores']} for this process: {cpu['affinity']} of {cpu['online']} by affinity{quota}{ranks}",
        "counters": "off"
        if facts["counters"]["off"]
        else f"{facts['counters']['directory']}, {_bytes(facts['counters']['free_bytes'], '?')} free",
        "torch": _torch(facts["versions"], facts["cuda"]),
    }
    if facts["measured"]:
        rows |= _speeds(facts["measured"])
    return rows


def _ring(ring: Mapping[str, Any]) -> str:
    return "works" if ring["answer"] == "ok" else f"refused ({ring['answer']})"


def _io_rows(io: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows about the file system."""
    if io["direct_write"] != "ok":
        direct = f"refused ({io['direct_write'] or io['direct_open']})"
    else:
        passes = {
            True: "goes past the page cache",
            False: "is buffered anyway",
            None: "may use the page cache",
        }
        direct = f"works, {passes[io['direct_bypasses']]}"
    if io["memory_alignment"] is not None:
        direct += f", alignment {io['memory_alignment']} in memory, {io['offset_alignment']} in the file"
    answers = {
        "uncached (RWF_DONTCACHE)": "uncached",
        "fallocate": "fallocate",
        "exchange": "rename_exchange",
        "locks": "lock",
        "locks seen by": "lock_reach",
        "reflinks": "reflink",
    }
    return {
        "direct I/O": direct,
        "files": ", ".join(f"{name} {io[key] or '?'}" for name, key in answers.items()),
    }


def _torch(versions: Mapping[str, Any], cuda: Mapping[str, Any]) -> str:
    torch = f"torch {versions['torch']}" if versions["torch"] else "no torch"
    built = f" (CUDA {versions['torch_cuda']})" if versions["torch_cuda"] else ""
    driver = cuda["error"] or f"{count(cuda['devices'], 'GPU')}, driver for CUDA {cuda['version']}"
    return f"{torch}{built}, {driver}; fastckpt {versions['fastckpt']}, Python {versions['python']}"


def _speeds(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of the measurement."""
    if not measured["load"]:
        return {}
    write, read, save, load = (measured[key] for key in ("raw_write", "raw_read", "save", "load"))
    return {
        "plain": f"{write['gigabytes_per_second']:.3g} GB/s written and synced, "
        f"{read['gigabytes_per_second']:.3g} read "
        f"({size(write['bytes'])}, {write['threads']} threads, {'direct' if write['direct'] else 'buffered'})",
        "fastckpt": f"{save['gigabytes_per_second']:.3g} GB/s saved, {load['gigabytes_per_second']:.3g} loaded "
        f"({size(save['bytes'])}, median of {save['rounds']}, engine {save['engine']})",
    }


def _bytes(number: int | None, otherwise: str = "") -> str:
    return otherwise if number is None else size(number)
