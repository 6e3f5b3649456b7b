"""The page of results matches its data, and each of its rows is a row of the campaign."""

from __future__ import annotations

import json

from faults import mutants, page
from faults.row import DISTINCT
from faults.rows import rows


def test_the_page_is_what_the_data_say():
    document = json.loads(page.DATA.read_text("utf-8"))
    assert page.DATA.with_suffix(".md").read_text("utf-8") == page.page(document)
    assert document["rows"].keys() <= rows().keys()
    assert document["mutants"].keys() <= mutants.MUTANTS.keys()
    assert all(one["caught"] for caught in document["mutants"].values() for one in caught.values())


def test_a_campaign_replaces_its_rows_and_leaves_the_others(tmp_path):
    about = {"date": "2026-01-31", "commit": "0", "tier": "fast", "machine": "m"}
    first = {"seed": 1, "trials": 250, "violations": [], "details": {DISTINCT: 40}}
    parts = [first, {"seed": 2, "trials": 50, "violations": []}]
    for name, number in (("kills", 2), ("groups", 1)):
        caught = {name: {"trials": number, "by": "lost"}}
        found = {**about, "parts": {name: parts[:number]}, "mutants": {"checksum": caught}}
        (tmp_path / "found.json").write_text(json.dumps(found), encoding="utf-8")
        page.write(tmp_path / "found.json", tmp_path / "reliability.json")
    document = json.loads((tmp_path / "reliability.json").read_text("utf-8"))
    assert {name: row["trials"] for name, row in document["rows"].items()} == {"kills": 300, "groups": 250}
    assert document["mutants"]["checksum"].keys() == {"kills", "groups"}
    text = (tmp_path / "reliability.md").read_text("utf-8")
    assert "| 300 (40 distinct states) | 0 | below 1 % |" in text
    assert text.count("not run") + text.count("by the gate |") == len(rows()) - 2
