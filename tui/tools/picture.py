"""Renders a picture of the live view watching real processes: an SVG, and a PNG where rsvg-convert is there.

    python tools/picture.py monitor.svg --size 120x32 --at 60 -- python train.py

starts the command, watches it, and takes the picture when its operation has reached 60 %. Without a command it watches
the processes that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastckpt_top import feed, targets
from fastckpt_top.app import TopApp
from fastckpt_top.model import Model
from fastckpt_top.session import Live
from fastckpt_top.views.state import Ui

# librsvg ignores textLength and has no Fira Code: with this size DejaVu's advance is the grid's 12.2 pixels.
PNG_EDITS = (
    ("font-family: Fira Code, monospace", 'font-family: "DejaVu Sans Mono"'),
    ("font-size: 20px", "font-size: 20.264px"),
    ("<text ", '<text xml:space="preserve" '),
)


def main() -> int:
    """Parse arguments, start the command, take the picture.

    Returns:
        0, or 1 if no operation reached the wanted progress in time.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] svg [-- command ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("svg", type=Path, help="the picture; the PNG goes beside it")
    parser.add_argument("--size", default="120x32", help="cells, as in 120x32")
    parser.add_argument("--at", type=float, default=60.0, help="progress in percent at which the picture is taken")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for it")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument("--target", help="as for fastckpt-top")
    parser.add_argument("--gpus", type=int, help="as for fastckpt-top")
    parser.add_argument("--theme", default="", help="a Textual theme")
    parser.add_argument("--keys", default="", help="keys to press first, separated by commas: t,down")
    parser.add_argument("--zoom", type=float, default=1.2, help="pixels of the PNG per unit of the SVG")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    command = words[cut + 1 :]
    width, height = (int(part) for part in args.size.split("x"))
    with tempfile.TemporaryDirectory() as place:
        child = None
        if command:  # nothing but what it starts is to be seen
            os.environ["FASTCKPT_TOP_DIR"] = place
            child = subprocess.Popen(command)
        try:
            svg = asyncio.run(_watch(args, (width, height)))
        finally:
            if child is not None:
                child.wait()
    if svg is None:
        print(f"no operation reached {args.at:g} % within {args.timeout:g} s", file=sys.stderr)
        return 1
    args.svg.write_text(svg, "utf-8")
    print(args.svg)
    _png(args.svg, svg, args.zoom)
    return 0


async def _watch(args: argparse.Namespace, size: tuple[int, int]) -> str | None:
    source = feed.ShmFeed(feed.directories(os.environ, os.geteuid()))
    target = targets.parse(args.target, "option") if args.target else None
    model = Model(target, args.gpus)
    app = TopApp(Live(source, model), Ui(interval=args.interval), theme=args.theme)
    deadline = time.monotonic() + args.timeout
    async with app.run_test(size=size) as pilot:
        for key in filter(None, args.keys.split(",")):
            await pilot.press(key)
        while time.monotonic() < deadline:
            op = model.main
            if op is not None and op.running and op.progress is not None and op.progress * 100 >= args.at:
                await pilot.pause()
                return app.export_screenshot(title="fastckpt-top")
            await asyncio.sleep(args.interval / 4)
    return None


def _png(path: Path, svg: str, zoom: float) -> None:
    program = shutil.which("rsvg-convert")
    if program is None:
        print("no PNG: rsvg-convert (Debian: librsvg2-bin) is missing", file=sys.stderr)
        return
    for old, new in PNG_EDITS:
        svg = svg.replace(old, new)
    png = path.with_suffix(".png")
    subprocess.run([program, "-z", str(zoom), "-o", str(png)], input=svg.encode(), check=True)
    print(png)


if __name__ == "__main__":
    sys.exit(main())
