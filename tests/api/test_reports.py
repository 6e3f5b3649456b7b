"""Reports cannot be changed."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

import fastckpt


def test_a_report_cannot_be_changed(tmp_path):
    report = fastckpt.save({"w": np.ones(3)}, tmp_path / "c")
    for mapping in (report.phases, report.blocks):
        kept = dict(mapping)
        for change in (
            lambda m=mapping: m.update(plan=0),
            lambda m=mapping: m.__setitem__("plan", 0),
            lambda m=mapping: m.__ior__({"plan": 0}),
            mapping.clear,
            mapping.popitem,
        ):
            with pytest.raises(TypeError, match="cannot be changed"):
                change()
        assert mapping == kept
        assert json.loads(json.dumps(mapping)) == kept
    assert report == pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == dataclasses.replace(report)
    assert dataclasses.asdict(report)["phases"] == report.phases
