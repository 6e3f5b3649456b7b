"""The page of supported systems agrees with its data, has each row of scripts/matrix, and keeps earlier runs."""

from __future__ import annotations

import datetime as dt
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pages import support

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path):
    document = {"sections": [{"title": "Files", "rows": []}]}
    for name, result, date in (("ran", "passed", "2026-01-31"), ("never", "not run", None)):
        row = {"name": name, "what": name.upper(), "result": result, "date": date, "on": None, "ran": "why"}
        document["sections"][0]["rows"].append(row)
    file = tmp_path / "support.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def rows(file):
    return [row for section in json.loads(file.read_text("utf-8"))["sections"] for row in section["rows"]]


def test_the_page_is_what_the_data_say():
    document = json.loads(support.DATA.read_text("utf-8"))
    assert support.DATA.with_suffix(".md").read_text("utf-8") == support.page(document)


def test_rows_say_what_ran_or_why_nothing_did():
    found = rows(support.DATA)
    assert len({row["name"] for row in found}) == len(found)
    for row in found:
        ran = row["result"] in ("passed", "part", "failed")
        assert row["result"] in support.RESULTS
        assert ran == (row["date"] is not None) == (row["on"] is not None), row["name"]
        assert row["ran"].strip(), row["name"]
        assert "|" not in row["what"] + row["ran"], row["name"]
        if ran:
            dt.date.fromisoformat(row["date"])


def test_every_row_of_the_matrix_has_a_place(monkeypatch):
    loader = importlib.machinery.SourceFileLoader("matrix", str(ROOT / "scripts" / "matrix"))
    matrix = importlib.util.module_from_spec(importlib.util.spec_from_loader("matrix", loader))
    monkeypatch.setitem(sys.modules, "matrix", matrix)
    loader.exec_module(matrix)
    assert {row.name for row in matrix.ROWS} <= {row["name"] for row in rows(support.DATA)}


def test_a_run_is_recorded_and_what_did_not_run_replaces_none(data):
    run = {"date": "2026-02-28", "on": "Linux 6.18", "data": data}
    support.record("ran", result="not run", ran="no room", **run)
    assert rows(data)[0]["date"] == "2026-01-31"
    support.record("never", result="not run", ran="no room", **run)
    assert (rows(data)[1]["date"], rows(data)[1]["ran"]) == (None, "no room")
    support.record("ran", result="failed", ran="tests", **run)
    support.record("never", result="passed", ran="tests", **run)
    page = data.with_suffix(".md").read_text("utf-8")
    assert "| RAN | **failed**, 2026-02-28 | Linux 6.18 | tests |" in page
    assert "| NEVER | passed, 2026-02-28 | Linux 6.18 | tests |" in page
    support.record("never", result="not run", ran="no room", **run)
    assert rows(data)[1]["result"] == "passed"
    with pytest.raises(KeyError):
        support.record("other", result="passed", ran="tests", **run)
