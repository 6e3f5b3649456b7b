"""A benchmark's result as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._text import count, size, table

if TYPE_CHECKING:
    from collections.abc import Mapping

TITLES = {
    "raw_write": "raw write",
    "save": "save",
    "raw_read": "raw read",
    "load": "load, cold",
    "hot": "load, hot",
}
_HEAD = ("", "GB/s", "min", "max", "seconds", "min", "max", "slowest rank", "per thread", "of raw")


def summary(document: Mapping[str, Any]) -> str:
    """The result in one line."""
    save, load, target = document["scores"]["save"], document["scores"]["load"], document["target"]
    judged = f"target {target['name']} for {count(target['gpus'], 'GPU')} {'met' if target['met'] else 'not met'}"
    asked = ", ".join(
        f"{target[kind]['reached']:.3g} of {target[kind]['needed']:g} GB/s {verb}"
        for kind, verb in (("write", "written"), ("read", "read"))
    )
    saved, loaded = (
        f"{score['gigabytes_per_second']['median']:.3g} GB/s ({score['of_raw']:.2f} of raw)" for score in (save, load)
    )
    return f"saved {size(save['bytes'])} at {saved}, loaded at {loaded}: {judged} (per GPU {asked})"


def lines(document: Mapping[str, Any]) -> list[str]:
    """The screen: the job, the table, the engine, the summary."""
    ranks, scores = document["ranks"], document["scores"]
    sizes = sorted({rank["bytes"] for rank in ranks})
    each = " to ".join(size(value) for value in (sizes if len(sizes) < 2 else (sizes[0], sizes[-1])))  # noqa: PLR2004
    what = document["options"]["workload"]
    shape = f" ({what}, scale {document['options']['scale']:g})" if what else ""
    directory = f"{document['directory']['path']} ({document['directory']['type'] or 'unknown file system'})"
    about = f"{count(len(ranks), 'rank')} x {each}{shape}, {count(ranks[0]['tensors'], 'tensor')} each"
    screen = [
        f"{directory}: {about}, incompressible, {count(document['options']['rounds'], 'round')}",
        "",
        *table([_HEAD, *(_row(TITLES[name], scores[name]) for name in TITLES if name in scores)], right=range(1, 10)),
        "",
    ]
    return [*screen, *table(_how(document)), "", document["summary"]]


def _row(title: str, score: Mapping[str, Any]) -> tuple[str, ...]:
    rate, seconds = score["gigabytes_per_second"], score["seconds"]
    thread = score["thread_gigabytes_per_second"]
    return (
        title,
        *(f"{rate[key]:.3g}" for key in ("median", "min", "max")),
        *(f"{seconds[key]:.3f}" for key in ("median", "min", "max")),
        f"{score['slowest_rank_gigabytes_per_second']['median']:.3g}",
        f"{thread['median']:.3g}" if thread else "-",
        f"{score['of_raw']:.2f}" if score["of_raw"] else "-",
    )


def _how(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows on engine, threads and caches."""
    how, scores = document["how"], document["scores"]
    rows = []
    for name in ("save", "load", "hot"):
        if name not in how:
            continue
        one = how[name]
        engines = ", ".join(one["engines"])
        threads = " to ".join(map(str, sorted({one["threads"][0], one["threads"][-1]})))
        why = f" ({'; '.join(one['fallbacks'])})" if one["fallbacks"] else ""
        paths = ", ".join(f"{number} {path}" for path, number in one["paths"].items())
        rows.append((TITLES[name], f"engine {engines}, threads per rank {threads}{why}; blocks: {paths or 'none'}"))
    rows.append(("cold", f"caches {document['caches']}{_resident(how['load'])}"))
    if "hot" in how:
        rows.append(("hot", f"files read through the page cache before{_resident(how['hot'])}"))
    rows.append(("raw", document["raw"]))
    if len(document["ranks"]) > 1:
        slow = [f"rank {scores[name]['slowest_rank']} ({TITLES[name]})" for name in ("save", "load")]
        rows.append(("slowest", f"{' and '.join(slow)} most often"))
        rows += [
            (f"ranks, {TITLES[name]}", _ranks(scores[name]["rank_gigabytes_per_second"])) for name in ("save", "load")
        ]
    first, median = scores["save"]["first_seconds"], scores["save"]["seconds"]["median"]
    rows.append(("first save", f"{first:.3f} s in fresh processes, {median:.3f} s in the median"))
    return [*rows, *(("note", note) for note in document["notes"])]


def _resident(how: Mapping[str, Any]) -> str:
    known = how["resident"]
    if known is None:
        return "; how much was cached is unknown here"
    return f": {100 * known['min']:.3g} to {100 * known['max']:.3g} % of the files were cached"


#: The most ranks that fit on a line; the JSON document lists all.
_RANKS = 16


def _ranks(rates: list[float]) -> str:
    shown = " ".join(f"{rate:.3g}" for rate in rates[:_RANKS])
    more = f" ... and {len(rates) - _RANKS} more, {min(rates):.3g} to {max(rates):.3g}" if len(rates) > _RANKS else ""
    return f"{shown}{more} GB/s"
