"""``fastckpt-top debug``: lists, prints and removes the shared segments themselves."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastckpt_top import console, feed, segment, text

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Carry out the subcommand, and return the exit code."""
    return {"ls": _list, "clean": _clean, "dump": _dump}[args.what](args)


def _list(args: argparse.Namespace) -> int:
    source = feed.ShmFeed(feed.chosen(args.dir, all_users=args.all_users), pids=args.pid, ranks=args.rank)
    snapshot = source.poll()
    source.close()
    found: list[dict[str, Any]] = []
    words = []
    for proc in sorted(snapshot.procs, key=lambda proc: (proc.rank, proc.header.pid)):
        header, age = proc.header, snapshot.real - proc.touched
        one: dict[str, Any] = {"path": proc.path, "pid": header.pid, "rank": proc.rank if proc.rank >= 0 else None}
        one |= {"uid": header.uid, "alive": proc.alive, "version": header.version, "job": header.job}
        found.append(one | {"age_s": round(age, 1), "problem": None})
        rank, state = (
            proc.rank if proc.rank >= 0 else "-",
            "alive" if proc.alive else f"dead, touched {text.ago(age)} ago",
        )
        who = f"pid {header.pid}, uid {header.uid}, rank {rank}, fastckpt {header.version}, {header.job or 'no job'}"
        words.append(f"{proc.path}: {who}, {state}")
    for path, reason in snapshot.problems:
        words.append(f"{path}: {reason}")
        found.append({"path": path, "problem": reason})
    lines = map(json.dumps, found) if args.json else words
    console.put("".join(f"{line}\n" for line in lines))
    if not found:
        console.nothing_found(f"no segment in {', '.join(snapshot.places) or 'any directory'}")
    return console.OK if found else console.NOTHING


def _clean(args: argparse.Namespace) -> int:
    places = feed.chosen(args.dir, all_users=args.all_users)
    places = feed.directories_of_all() if places is None else places
    for path in feed.sweep(places, now=time.time(), uid=os.geteuid(), dry_run=not args.yes):
        console.put(f"{'removed' if args.yes else 'would remove'} {text.clean(path)}\n")
    return console.OK


def _dump(args: argparse.Namespace) -> int:
    try:
        with Path(args.segment).open("rb") as file:
            found = segment.decode(file.read(segment.MAX_SIZE + 1))
    except segment.BadSegment as error:
        console.complain(f"{args.segment}: {error}")
        return console.UNREADABLE
    console.put(json.dumps(asdict(found), indent=1) + "\n")
    return console.OK
