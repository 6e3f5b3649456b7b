"""Handmade rows and frames for the tests of painting."""

from __future__ import annotations

from fastckpt_top import text
from fastckpt_top.model import Model
from fastckpt_top.rows import Row, ThreadRow, judge
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.state import Ui

TARGET = 3e9
DASH = "\N{EN DASH}"


def thread(index, share=1.0, count=4, **values):
    target = TARGET / count
    rate = None if share is None else share * target
    known = {
        "index": index, "tid": 5400 + index, "cpu": 0, "state": "WRITE", "rate": rate, "done": 10**9,
        "in_flight": 8, "latency_s": 0.01, "latency_max_s": 0.2, "waits": {"disk": 0.98, "source": 0.01, "limit": 0.0},
        "target": target, "slow": False, "retries": 0, "shorts": 0, "errors": 0, "spark": (target,) * 20,
        "p50_s": 0.0069, "p99_s": 0.0495,
    }  # fmt: skip
    return ThreadRow(**known | values)


def rank(number, share=1.0, count=4, **values):
    rate = share * TARGET
    known = {
        "key": f"p{number}/1", "proc_key": f"p{number}", "rank": number, "gpu": number, "pid": 5327 + number,
        "user": "ann", "job": "job", "alive": True, "kind": "save", "running": True,
        "state": "WRITE", "rate": rate, "average": rate, "target": TARGET, "done": 2 * 10**10, "total": 4 * 10**10,
        "progress": 0.5, "eta_s": 20.0, "verdict": judge(rate, TARGET), "engine": "uring", "direct": True,
        "label": "step-100", "path": "/mnt/nvme0/runs/a/step-100", "block_size": 16 << 20, "queue_depth": 8,
        "wait": "disk 98%", "wait_kind": "disk", "wait_share": 0.98, "spark": (rate,) * 20,
        "threads": tuple(thread(index, share, count) for index in range(count)),
        "worst": 10 + 400 * max(1 - share, 0.0),
    }  # fmt: skip
    return Row(**known | values)


def frame(rows=(), size=(80, 24), ui=None, glyphs=text.UNICODE):
    model = Model()
    model.rows = list(rows)
    return Frame(model, ui or Ui(), glyphs, *size)


def plain(lines):
    return [line.plain for line in lines]
