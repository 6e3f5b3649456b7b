"""The sentence: the rank that holds an operation back, and why.

The sentence is about the first of these that applies: a rank that died or failed; one that stalled; ranks that have not
begun; the only one left; a bandwidth limit that most ranks wait for; the rank that the others wait for; the reason why
the operation is below its target; a fallback; success. The level is `bad` if a person is needed, `warn` if the
operation, or the rank that alone decides when it ends, is below its target, and `info` otherwise.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

from fastckpt_top import phrases, text
from fastckpt_top.estimate import BEHIND, QUIET_S
from fastckpt_top.rows import Sentence, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt_top.rows import NodeOp, Row

SHORT: Final = 36
"""The most cells of the shortest words."""
_MOST: Final = 0.5
"""The least share of ranks whose wait counts as that of the operation."""
_WAITED: Final = {
    "disk": "its ranks waited for the disk",
    "source": "its ranks waited for the source",
    "limit": "held by bandwidth_limit",
    "fsync": "most of the time in fsync",
    "peers": "its ranks waited for each other",
}


def sentence(op: NodeOp, rows: Sequence[Row], cause: str = "") -> Sentence | None:
    """The most important fact about an operation now.

    Args:
        op: The operation.
        rows: The rows of its ranks, the ended ones too.
        cause: The most frequent `cause` while it ran; empty if unknown.

    Returns:
        None if there is nothing to report: in the first second, and without a target.
    """
    if op.failed:
        return _lost(op, rows)
    if not op.running:
        return _safely(_copied(op) if op.copies else _ended(op, rows, cause), op)
    running = [row for row in rows if row.running]
    stalled = [row for row in running if row.stalled_s is not None]
    if stalled:
        return _stalled(stalled)
    if op.elapsed_s < QUIET_S:
        return None
    if op.copies:
        return _safely(_copied(op), op)
    return _missing(op) if op.missing else _slow(op, running)


def _copied(op: NodeOp) -> Sentence:
    """The sentence about the progress of a copy, or its result."""
    when = phrases.eta(op) if op.running else f"in {op.elapsed_s:.1f} s"
    moved = phrases.nothing(op) if op.empty else f"{phrases.moved(op)}, {when}"
    return _made("info", "", f"{op.kind} of {op.label}: {moved}", moved, f"{op.kind}: {when}")


def _safely(said: Sentence | None, op: NodeOp) -> Sentence | None:
    """Add the places where the last step is safe to a sentence."""
    safe = phrases.safe(op)
    if said is None or not safe:
        return said
    return _made(said.level, said.row, f"{said.words[0]}; {safe}", *[safe] * op.copies, *said.words)


def _missing(op: NodeOp) -> Sentence:
    """The sentence if ranks of this machine do not take part."""
    here = f"{op.ranks} of {text.count(op.ranks + len(op.missing), 'rank')}"
    who = phrases.some([f"rank {rank}" for rank in op.missing])
    if op.running:
        late = f"{who} {'has' if len(op.missing) == 1 else 'have'} not begun"
        return _made("warn", "", f"{here} {'is' if op.ranks == 1 else 'are'} here; {late}", late)
    return _made("warn", "", f"{op.label or op.kind}: {here} took part; {who} did not", f"{here} took part")


def _slow(op: NodeOp, running: list[Row]) -> Sentence | None:
    """The sentence about the ranks that hold up a running operation."""
    if len(running) == 1 < op.ranks:
        return _together(op, running)
    limited = [row for row in running if row.wait_kind == "limit"]
    if limited and len(limited) > _MOST * len(running) and op.verdict in (Verdict.LOW, Verdict.BAD):
        return _limited(op)
    behind = next((row for row in running if row.straggler), None)
    if behind is not None:
        if op.verdict is behind.verdict is Verdict.GOOD:
            return _one(op, behind, f"on target; {behind.name} is the last", f"{behind.name} is the last")
        return _held_back(op, behind, running)
    return _together(op, running)


def cause(op: NodeOp, rows: Sequence[Row]) -> str:
    """The cause that delays a running operation now, in words for the sentence at its end; empty if there is none."""
    running = [row for row in rows if row.running]
    kind, _ = _shared(running)
    if op.last and (kind != "limit" or len(running) == 1 < op.ranks):
        return f"held back by {op.last}"
    return _WAITED.get(kind, "")


def _lost(op: NodeOp, rows: Sequence[Row]) -> Sentence:
    """The sentence if a rank died or failed."""
    dead = [row for row in rows if row.state == "DEAD"]
    if dead:
        who = phrases.names(dead)
        end = {
            "save": ": this checkpoint cannot be completed" if op.running else ": this checkpoint was not completed",
            "load": ": it was not loaded whole",
            "verify": ": it was not verified whole",
        }.get(op.kind, ": it is not at its target")
        short = {"save": ": no checkpoint", "load": " in load", "verify": " in verify"}.get(op.kind, "")
        return _made("bad", dead[0].key, f"{who} died{end}", f"{who} died{short}", f"{phrases.count(dead)} died")
    failed = [row for row in rows if row.error]
    row = failed[0] if failed else None
    known = row is not None and row.error not in ("", "failed")
    what = row.error if row is not None and known else f"{op.kind} failed"
    well = [row for row in rows if not (row.running or row.error)]
    after = ": nothing was replaced" if op.kind == "save" and not well else ""
    by = f"{phrases.names(failed)}: " if op.ranks > 1 and failed else ""
    where = f" in {op.label}" if op.label else ""
    reads = "" if op.kind == "save" or not known else f", {op.kind} failed"
    if what == "ECANCELED" and op.copies:
        what, reads = f"the {op.kind} was given up", ""
    return _made(
        "bad",
        row.key if row is not None else "",
        f"{by}{what}{where}{reads}{after}",
        f"{what}{where}{reads}{after}",
        f"{what}{reads}{after}",
    )


def _stalled(rows: list[Row]) -> Sentence:
    """The sentence about ranks that give no sign of life, or move no byte."""
    row = max(rows, key=lambda row: row.stalled_s or 0.0)
    seconds = phrases.seconds(row.stalled_s or 0.0)
    kind = row.wait_kind
    same = [other for other in rows if (other.stopped, other.wait_kind) == (row.stopped, kind)]
    who = phrases.names(same)
    words: tuple[str, ...]
    if row.hangs and not row.stopped:
        more = f" ({len(rows)} ranks made no progress)" if len(rows) > 1 else ""
        words = (f"{row.name} {row.hangs}{more}", row.hangs)
    elif row.stopped:
        signal = "SIGSTOP" if row.process_state == "T" else "debugger"
        words = (f"{who} stopped ({signal}) for {seconds}", f"{phrases.count(same)} stopped for {seconds}")
    elif kind == "disk":
        words = (
            f"{who}: the storage has not answered for {seconds}",
            f"{phrases.count(same)}: no answer for {seconds}",
        )
    else:
        none = f"{who} {'has' if len(same) == 1 else 'have'} made no progress for {seconds}"
        words = (
            f"{none}{phrases.colon(phrases.waits(kind, same))}",
            f"{phrases.count(same)}: no progress for {seconds}",
        )
    return _made("bad", row.key, *words)


def _limited(op: NodeOp) -> Sentence:
    now, target = phrases.compared(op.rate if op.rate is not None else op.average, op.target)
    of = f" of {target}" if target else ""
    return _made(
        _level(op),
        "",
        f"held at {now}{of} GB/s by bandwidth_limit",
        f"held at {now} by bandwidth_limit",
    )


def _held_back(op: NodeOp, row: Row, running: list[Row]) -> Sentence:
    """The sentence about one rank for which the others wait."""
    waiting = sum(_idles(other) for other in running)
    others = f" ({text.count(waiting, 'rank')} {'waits' if waiting == 1 else 'wait'} for it)" if waiting else ""
    return _one(op, row, f"Held back by {row.name}", f"{row.name} holds it", others=others)


def _left(op: NodeOp, row: Row) -> Sentence:
    """The sentence if all ranks but one have ended."""
    why = "its own bandwidth_limit" if row.wait_kind == "limit" else phrases.why(row)
    return _one(op, row, f"only {row.name} is left", f"{row.name} is left", why=why)


def _one(op: NodeOp, row: Row, words: str, short: str, *, why: str = "", others: str = "", more: str = "") -> Sentence:
    """A sentence about one rank: `words`, or `short` ones, with its rate, the reason, and its fallback.

    Args:
        op: The operation.
        row: The rank.
        words: The words for what the rank does.
        short: The same words where there is less room.
        why: The reason; empty for the rank's own.
        others: What the other ranks do meanwhile.
        more: What ranks fell back to; empty for this rank alone.
    """
    told = phrases.colon(phrases.speed(row), why or phrases.why(row))
    more = more or phrases.fallback([row], "; ", named=False)
    return _made(
        _level(op, row),
        row.key,
        f"{words}{others}{told}{more}",
        f"{words}{told}{more}",
        f"{short}{phrases.colon(phrases.speed(row, '/'), phrases.brief(row))}"
        f"{more.replace('; runs ', '; ').replace('io_uring', 'uring')}",
        f"{words}{told}",
        f"{short}{phrases.colon(phrases.speed(row), phrases.brief(row))}",
        *phrases.terse(row),
        words[0].lower() + words[1:],
    )


def _together(op: NodeOp, running: list[Row]) -> Sentence | None:
    """The sentence if no rank is waited for."""
    if running and all(row.state == "STAGE" for row in running):
        done = "" if op.progress is None else f", {text.percent(op.progress).replace('%', ' %')}"
        what = f"{_all(running, op)} {'copies' if len(running) == 1 else 'copy'} the state into memory{done}"
        later = "; training goes on when that is done"
        return _made("info", "", f"{what}{later}", what, f"copies the state{done}")
    kind, those = _shared(running)
    if kind == "peers" and all(_idles(row) for row in those):
        return _peers(those)
    if kind == "fsync" and all(row.state in phrases.SYNCING for row in those):
        return _made(_level(op), those[0].key if len(those) == 1 else "", *_syncing(op, running, those))
    if op.ranks > 1 and len(running) == 1:
        return _left(op, running[0])
    if op.verdict in (Verdict.LOW, Verdict.BAD) or op.target <= 0:
        return _below(op, running, kind, those)
    return _well(op, running)


def _below(op: NodeOp, running: list[Row], kind: str, those: list[Row]) -> Sentence | None:
    """The sentence below the target, or without one: the slowest rank, else the wait of most ranks."""
    more = phrases.fallback(running, "; ")
    slow = _slowest(running)
    if slow is not None:
        return _one(op, slow, f"slowest is {slow.name}", slow.name, more=more)
    average, target = phrases.compared(op.average, op.target)
    figures = f"average {average} of {target} GB/s" if target else f"average {average} GB/s"
    default = f" ({op.target_name}, the default target)" if op.target_source == "default" and target else ""
    if kind not in phrases.WAITS:
        return _made(_level(op), "", f"{figures}{default}{more}", f"{figures}{more}", figures) if target else None
    cause = f"{_all(those, op)} {phrases.waits(kind, those)}{phrases.share(those)}"
    who = "all" if 1 < len(those) == op.ranks else phrases.count(those)
    return _made(
        _level(op),
        running[0].key if len(running) == 1 else "",
        f"{figures}{default}: {cause}{phrases.hint(kind, op.kind)}{more}",
        f"{figures}: {cause}",
        f"{cause}{more}",
        cause,
        f"{who}: {phrases.brief(those[0]) if len(those) == 1 else f'{kind}{phrases.share(those)}'}",
    )


def _well(op: NodeOp, running: list[Row]) -> Sentence | None:
    """The sentence if the operation is on target, or it is too early to judge."""
    if tail := phrases.fallback(running):
        row = next(row for row in running if row.fallback)
        return _made("info", row.key, tail, f"fallback: {row.engine} ({row.fallback})")
    if op.verdict is not Verdict.GOOD:
        return None
    average, target = phrases.compared(op.average, op.target)
    return _made("info", "", f"on target: average {average} of {target} GB/s", f"on target: {average}/{target}")


def _ended(op: NodeOp, rows: Sequence[Row], cause: str) -> Sentence | None:
    """The sentence about an ended operation."""
    still = phrases.still(op)
    if still:
        words = f"no tensor of the {' and of the '.join(still)} has changed"
        whole = f"{op.label or op.kind}: {words} since the save before"
        return _made("warn", "", whole, words, f"{' and '.join(still)} unchanged")
    if op.missing:
        return _missing(op)
    name = op.label or op.kind
    if op.empty:
        return _made("info", "", f"{name}: {phrases.nothing(op)}", phrases.nothing(op))
    if op.verdict is Verdict.QUIET:
        return None
    average, target = phrases.compared(op.average, op.target)
    more = phrases.fallback(rows, "; ", past=True)
    if op.verdict is Verdict.GOOD:
        return _made(
            "info",
            "",
            f"{name} was on target: {average} of {target} GB/s{more}",
            f"on target: {average} of {target} GB/s",
            f"on target: {average}/{target}",
        )
    default = " (the default)" if op.target_source == "default" else ""
    by = f", {cause}" if cause else ""
    return _made(
        "warn",
        "",
        f"{name} stayed below its target{default}: {average} of {target} GB/s{by}{more}",
        f"{name} below target: {average} of {target} GB/s{by}",
        f"below target{by.replace('its ranks ', '')}",
        f"below target: {average} of {target} GB/s",
        f"below target: {average}/{target}",
    )


def _syncing(op: NodeOp, running: list[Row], those: list[Row]) -> tuple[str, ...]:
    """The words for ranks that are mostly in fsync."""
    since = max(row.phase_s or 0.0 for row in those)
    during = f" for {phrases.seconds(since)}" if since >= 1.0 else ""
    if len(running) == 1 < op.ranks:
        return (f"only {those[0].name} is left, in fsync{during}", f"{those[0].name} in fsync{during}")
    who = _all(those, op)
    words = f"{who} {'is' if len(those) == 1 else 'are'} in fsync{during}"
    written = "all data is written; " if len(those) == len(running) else ""
    return (f"{written}{words}", words, f"fsync{during}")


def _peers(those: list[Row]) -> Sentence:
    """The sentence about ranks that wait for one that is not here, or not working."""
    name, _ = Counter(row.wait for row in those).most_common(1)[0]
    does = "waits" if len(those) == 1 else "wait"
    who = phrases.names(those)
    return _made(
        "info",
        those[0].key,
        f"{who} {does} for {name}, which is at no work on this machine",
        f"{who} {does} for {name}",
        f"{phrases.count(those)} {does} for {name}",
    )


def _idles(row: Row) -> bool:
    """Whether a rank only waits for another, which it names."""
    return row.state == "WAIT"


def _slowest(running: list[Row]) -> Row | None:
    """The rank whose rate is clearly below those of the others; None if there is none."""
    rates = [(row.rate, row) for row in running if row.rate is not None]
    if len(rates) < 2:  # noqa: PLR2004
        return None
    rate, row = min(rates, key=lambda pair: pair[0])
    return row if rate * BEHIND < statistics.median(rate for rate, _ in rates) else None


def _shared(running: list[Row]) -> tuple[str, list[Row]]:
    """The kind of wait of most ranks, and these ranks; nothing if there is none."""
    kind, count = Counter(row.wait_kind for row in running).most_common(1)[0] if running else ("", 0)
    those = [row for row in running if row.wait_kind == kind]
    return (kind, those) if kind and count > _MOST * len(running) else ("", [])


def _level(op: NodeOp, row: Row | None = None) -> str:
    """The sentence of a running operation, and of the rank that alone decides when it ends."""
    low = (Verdict.LOW, Verdict.BAD)
    return "warn" if op.verdict in low or (row is not None and row.verdict in low) else "info"


def _all(those: Sequence[Row], op: NodeOp) -> str:
    if op.ranks == 1 or len(those) == 1:
        return those[0].name
    return f"all {op.ranks} ranks" if len(those) == op.ranks else f"{len(those)} of {op.ranks} ranks"


def _made(level: str, row: str, *words: str) -> Sentence:
    """A sentence of several wordings: each is shorter than the one before, and the last has at most `SHORT` cells."""
    kept: list[str] = []
    for one in words:
        if not kept or text.width(one) < text.width(kept[-1]):
            kept.append(one)
    if text.width(kept[-1]) > SHORT:
        kept.append(text.cut(kept[-1], SHORT - 1) + "\N{HORIZONTAL ELLIPSIS}")
    return Sentence(level, tuple(kept), row)
