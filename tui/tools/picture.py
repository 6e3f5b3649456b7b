"""Draws the last moment of a recording as SVG.

    fastckpt-top --record save.jsonl.gz
    python tui/tools/picture.py save.jsonl.gz save.svg --size 120x30

The picture shows the screen as in live use, without the position and the keys of a replay.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import svg

from fastckpt_top.app import TopApp
from fastckpt_top.demo import DemoSource
from fastckpt_top.replay import Replay
from fastckpt_top.session import Live
from fastckpt_top.views.state import Ui

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt_top.model import Model


class Still(Live):
    """A session whose time does not pass.

    Args:
        model: The model to show.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(DemoSource(), model)  # this source is never read

    def tick(self) -> None:
        """Do nothing: the model does not change."""


def draw(recording: Path, size: tuple[int, int], keys: Sequence[str] = (), theme: str = "") -> str:
    """Draw the last moment of a recording.

    Args:
        recording: The file.
        size: Columns and lines of the screen.
        keys: The keys to press first, by Textual's names.
        theme: A Textual theme; empty for its default.

    Returns:
        The SVG.

    Raises:
        ReplayError: The file is not a recording that this version can play.
    """
    replay = Replay(str(recording))
    replay.end()

    async def take() -> str:
        app = TopApp(Still(replay.model), Ui(), theme=theme)
        async with app.run_test(size=size) as pilot:
            await pilot.press(*keys)
            await pilot.pause()
            return svg.of(app.canvas)

    return asyncio.run(take())


def main() -> int:
    """Draw one picture.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="a file of fastckpt-top --record")
    parser.add_argument("svg", type=Path, help="the picture")
    parser.add_argument("--size", type=_size, default=(120, 30), help="columns and lines (default 120x30)")
    parser.add_argument("--keys", default="", help="keys to press first, separated by commas: t,down")
    parser.add_argument("--theme", default="", help="a Textual theme")
    args = parser.parse_args()
    args.svg.write_text(draw(args.recording, args.size, [*filter(None, args.keys.split(","))], args.theme), "utf-8")
    return 0


def _size(word: str) -> tuple[int, int]:
    columns, _, lines = word.partition("x")
    return int(columns), int(lines)


if __name__ == "__main__":
    sys.exit(main())
