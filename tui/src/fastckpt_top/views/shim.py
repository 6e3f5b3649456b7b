"""Until the ranks' own blocks are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt_top.views.boxes import Block, box, boxed
from fastckpt_top.views.paint import Frame, Line
from fastckpt_top.views.side import pane, panel
from fastckpt_top.views.table import columns, head, rows

if TYPE_CHECKING:
    from fastckpt_top.rows import Row


def selected(frame: Frame) -> Row | None:
    return frame.ui.selection(frame.ui.rows(frame.model.rows))


def wanted(frame: Frame, width: int) -> int:
    del width
    return len(frame.model.rows) + 3


def threads_wanted(frame: Frame, row: Row) -> int:
    del frame
    return len(row.threads) + 3


def ranks(frame: Frame, width: int, height: int) -> Block:
    inner = width - 4 if boxed(frame) else width
    cols = columns(inner)
    shown = frame.ui.rows(frame.model.rows)
    made = Block([head(frame, cols)])
    for line, key in rows(frame, shown, cols)[: height - (3 if boxed(frame) else 1)]:
        made.rows[len(made.lines)] = key
        made.lines.append(line)
    return box(frame, made, Line("ranks"), Line(), width, height) if boxed(frame) else made


def threads(frame: Frame, row: Row, width: int, height: int) -> Block:
    return box(frame, Block(pane(frame, row, columns(width - 4), height - 2)), Line(), Line(), width, height)


def history(frame: Frame, width: int, height: int) -> Block:
    return box(frame, Block(panel(frame, None, width - 4, height - 2)), Line(), Line(), width, height)
