"""The command, and its modes."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from fastckpt_top import console, feed, options, targets, text
from fastckpt_top.model import Model
from fastckpt_top.replay import Replay, ReplayError
from fastckpt_top.session import Live
from fastckpt_top.views.state import Ui

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from fastckpt_top.session import Session, Sink


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for the process's.

    Returns:
        The exit code.
    """
    args = options.parser().parse_args(argv)
    try:
        return _run(args)
    except ReplayError as error:
        console.complain(str(error))
        return console.UNREADABLE
    except BrokenPipeError:
        console.close()
        return console.OK
    except KeyboardInterrupt:
        return console.OK
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        console.complain(f"{name}{error.strerror or error}")
        return console.UNREADABLE


def _run(args: argparse.Namespace) -> int:
    if args.command is not None:
        from fastckpt_top import debug

        return debug.run(args)
    interval = args.interval or (1.0 if args.once or args.check is not None else 0.5)
    session = _session(args, interval)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        if args.check is not None:
            return _check(args, session, interval)
        if args.once:
            return _once(args, session, interval)
        if args.json or not _interactive():
            return _stream(args, session, interval)
        return _screen(args, session, interval)
    finally:
        session.close()
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stop(*_: object) -> None:
    """End line mode and recordings cleanly on SIGTERM, so that their files are complete."""
    raise KeyboardInterrupt


def _session(args: argparse.Namespace, interval: float) -> Session:
    target = args.target
    if target is None and (asked := os.environ.get("FASTCKPT_TOP_TARGET")):
        try:
            target = targets.parse(asked, "environment")
        except ValueError as error:
            print(f"fastckpt-top: FASTCKPT_TOP_TARGET: {error}", file=sys.stderr)
            raise SystemExit(console.USAGE) from None
    if args.replay is not None:
        return Replay(args.replay, target, args.gpus, args.speed, job=args.job)
    sinks: list[Sink] = []
    if args.record is not None:
        from fastckpt_top.record import Recorder

        sinks.append(Recorder(args.record))
    if args.prometheus is not None:
        from fastckpt_top.prometheus import Prometheus

        sinks.append(Prometheus(args.prometheus))
    model = Model(target, args.gpus, args.job)
    if args.demo:
        from fastckpt_top.demo import DemoSource

        demo = DemoSource()
        for snapshot in demo.past(60.0, interval):
            model.update(snapshot)
        return Live(demo, model, sinks)
    places = feed.chosen(args.dir, all_users=args.all_users)
    return Live(feed.ShmFeed(places, pids=args.pid, ranks=args.rank), model, sinks)


def _interactive() -> bool:
    """Whether there is a terminal to draw on. Textual draws on stderr, even if that is a pipe."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and os.environ.get("TERM") != "dumb"


def _glyphs(args: argparse.Namespace) -> text.Glyphs:
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return text.ASCII if args.ascii or not encoding.startswith("utf") else text.UNICODE


def _two_looks(session: Session, interval: float) -> None:
    """Look twice, because rates and the waits of ranks need two samples; a recording is read completely."""
    if isinstance(session, Replay):
        session.end()
        return
    session.tick()
    if session.model.node.active:
        time.sleep(interval)
        session.tick()


def _once(args: argparse.Namespace, session: Session, interval: float) -> int:
    from fastckpt_top import lines
    from fastckpt_top.jsonout import JsonWriter

    _two_looks(session, interval)
    model = session.model
    if args.json:
        JsonWriter(sys.stdout, header=False).write(model)
    elif not model.node.ranks and not model.past.checkpoints:
        console.nothing_found(lines.empty_text(model))
    else:
        console.put(lines.table(model, _glyphs(args)))
    return console.OK if model.node.ranks or model.past.checkpoints else console.NOTHING


def _check(args: argparse.Namespace, session: Session, interval: float) -> int:
    from fastckpt_top import lines

    _two_looks(session, interval)
    ends = time.monotonic() + (args.duration or 0.0)
    while not isinstance(session, Replay) and time.monotonic() < ends:
        time.sleep(min(interval, max(ends - time.monotonic(), 0.0)))
        session.tick()
    good, words = lines.check(session.model, args.check)
    if args.json:
        from fastckpt_top.jsonout import JsonWriter

        JsonWriter(sys.stdout, header=False).write(session.model)
    else:
        console.put(words + "\n")
    if good is None:
        return console.NOTHING
    return console.OK if good else console.BELOW


def _stream(args: argparse.Namespace, session: Session, interval: float) -> int:
    from fastckpt_top.jsonout import JsonWriter
    from fastckpt_top.lines import LineWriter

    writer = JsonWriter(sys.stdout) if args.json else LineWriter(sys.stdout, _glyphs(args))
    if not args.json and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    ends = None if args.duration is None else time.monotonic() + args.duration
    if isinstance(session, Replay):
        return _stream_replay(args, session, writer)
    done = 0
    due = time.monotonic()
    while True:
        session.tick()
        writer.write(session.model)
        done += 1
        due = max(due + interval, time.monotonic())
        if (args.count is not None and done >= args.count) or (ends is not None and due > ends):
            return console.OK
        time.sleep(max(due - time.monotonic(), 0.0))


def _stream_replay(args: argparse.Namespace, session: Replay, writer: Any) -> int:
    """All ticks of a recording, as fast as they can be read."""
    for index in range(len(session.recording)):
        session.step(index - session.index)
        writer.write(session.model)
        if args.count is not None and index + 1 >= args.count:
            break
    return console.OK


def _screen(args: argparse.Namespace, session: Session, interval: float) -> int:
    if args.no_color:
        os.environ["NO_COLOR"] = "1"
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    from fastckpt_top import config
    from fastckpt_top.app import TopApp

    file = None if args.no_config else config.path()
    kept, problem = config.load(file) if file is not None else ({}, "")
    ui = Ui(interval=interval, recording=args.record or "", view=args.view, zoom_s=kept.get("zoom", 0.0))
    ui.sort = args.sort or kept.get("sort", ui.sort)
    theme = args.theme or kept.get("theme", "")
    app = TopApp(session, ui, _glyphs(args), theme, args.duration, file, text.clean(problem))
    if args.theme and args.theme not in app.available_themes:
        console.complain(f"--theme: {args.theme!r} is unknown: choose one of {', '.join(sorted(app.available_themes))}")
        return console.USAGE
    app.run(mouse=False, inline=args.inline, inline_no_clear=args.inline)
    return app.return_code or 0
