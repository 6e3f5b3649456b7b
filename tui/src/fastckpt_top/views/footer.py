"""The keys in the last line, and the most urgent message besides the header's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.keys import KEYS, REPLAY_KEYS
from fastckpt_top.rows import LEVELS
from fastckpt_top.views.boxes import boxed, words
from fastckpt_top.views.paint import Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Event, Job

EVENT_SHOWN_S: Final = 60.0
"""Seconds for which a warning is shown."""


def keys(frame: Frame) -> Line:
    """The keys that fit whole. Help comes last, after a sign if keys are left out, so that users can find them all."""
    shown = [(key.sign, key.word) for key in (KEYS if frame.live else REPLAY_KEYS) if key.word]
    if len(frame.model.jobs) > 1:
        shown.insert(1, ("j", "Next job"))
    last, sign = ("?", "Help"), ""
    while shown and sum(len(key) + len(word) + 3 for key, word in (*shown, last)) + len(sign) > frame.width:
        shown.pop()
        last, sign = ("?", "all keys"), f" {frame.glyphs.ellipsis}"
    line = Line()
    for key, word in (*shown, last):
        line.add(sign if key == "?" else "", "low").add(" ").add(key, "key").add(f" {word} ", "dim")
    return line.fill(frame.width)


def urgent(frame: Frame) -> Line:
    """The most urgent of: a notice, trouble of a hidden job, a warning of the last minute, an unreadable file."""
    model, glyphs = frame.model, frame.glyphs
    if frame.ui.notice:
        return Line(frame.say(frame.ui.notice), "strong")
    for job in _in_trouble(frame):
        said = words(job.sentence.words, max(frame.width // 2, 36)) if job.sentence is not None else ""
        return Line(f"{glyphs.bad} {frame.say(text.clean(f'{job.name or job.pid}: {said}'))}", "bad")
    recent = [event for event in frame.events if model.real - event.real < EVENT_SHOWN_S and _news(frame, event)]
    if recent:
        event = recent[-1]
        return Line(f"{glyphs.warn} {frame.say(event.text)}", "bad" if event.level == "bad" else "low")
    if model.problems:
        path, reason = model.problems[0]
        return Line(f"{glyphs.warn} {frame.say(path)}: {reason}", "low")
    return Line()


def last_checkpoint(frame: Frame) -> Line:
    """`last save step-1000: 15.2 s, 21.00 GB/s`, while another operation runs."""
    past = frame.model.past.checkpoints
    if not past or (frame.main is not None and not frame.main.running):
        return Line()
    last = past[-1]
    said = f"last {last.kind} {frame.say(last.label)}: {last.seconds:.1f} s, {text.rate(last.average)} GB/s"
    return Line(f"{said}, {last.error}" if last.error else said, "bad" if last.error else "dim")


def _in_trouble(frame: Frame) -> list[Job]:
    shown = frame.job
    return [
        job for job in frame.model.jobs if job is not shown and job.sentence is not None and job.sentence.level == "bad"
    ]


def _news(frame: Frame, event: Event) -> bool:
    """Whether an event is a warning that is missing in the sentence, or more severe than it."""
    said = frame.main.sentence if frame.main is not None else None
    if said is None or event.level == "info":
        return event.level != "info"
    reasons = {row.fallback for row in frame.model.rows if row.fallback}
    told = any(reason in said.words[0] and reason in event.text for reason in reasons)
    return not told and LEVELS.index(event.level) > LEVELS.index(said.level)


def bottom(frame: Frame) -> Line:
    """The last line: the keys, or instead a notice or another job's trouble that no border can hold."""
    if (frame.ui.notice or _in_trouble(frame)) and not (boxed(frame) and frame.ui.view == "live"):
        return Line(" ").extend(urgent(frame)).fill(frame.width)
    return keys(frame)
