"""The graph's series: equal parts of the last minutes, which stay the same as time goes on."""

from __future__ import annotations

import math

import pytest
from fastckpt_top.series import KEPT_S, Series


def filled(seconds, rate, begin=1000.0):
    """A series of two looks a second; `rate` maps the time to the rate."""
    series = Series()
    for tick in range(int(seconds * 2)):
        now = begin + tick / 2 + 0.01
        series.add(now, rate(now), 2 * rate(now))
    return series


@pytest.mark.parametrize(("seconds", "cells"), [(60.0, 60), (60.0, 77), (600.0, 91), (120.0, 400), (20.0, 7)])
def test_what_is_past_does_not_change(seconds, cells):
    def rate(now):
        return float(int(now * 7) % 13)

    before: dict[int, float] = {}
    length = seconds / cells
    for total in range(650, 690):
        series = filled(total / 2 + 400, rate)
        written, read = series.cells(seconds, cells)
        assert read == pytest.approx([2 * value for value in written])
        last = math.ceil((series.index + 1) * 0.5 / length - 1e-9)
        parts = {last - index: value for index, value in enumerate(reversed(written), 1)}
        newest = max(parts)
        for number, value in parts.items():
            if number < newest:
                assert before.setdefault(number, value) == pytest.approx(value)


def test_the_mean_of_all_parts_is_the_mean_of_the_time_and_a_short_peak_is_in_it():
    series = filled(1000.0, lambda now: 100.0 if 1900.0 <= now < 1900.5 else 0.0)
    written, _ = series.cells(600.0, 50)
    assert len(written) == 50
    assert sum(written) * 12.0 == pytest.approx(100.0 * 0.5)
    assert sum(value > 0 for value in written) == 1
    assert [value for value in written if value < 1e-6] == [0.0] * 49, "no bytes give exactly zero"


def test_less_is_known_at_the_beginning():
    assert Series().cells(60.0, 10) == ([], [])
    series = filled(5.0, lambda _: 1.0)
    assert series.cells(60.0, 60) == ([1.0] * 5, [2.0] * 5)
    assert series.cells(0.0, 10) == series.cells(60.0, 0) == ([], [])


def test_looks_that_come_seldom_or_often_make_the_same_columns():
    for step in (0.1, 0.5, 2.0):
        series = Series()
        for tick in range(int(60 / step)):
            series.add(100.0 + tick * step, 5.0, 0.0)
        assert abs(len(series.written) - 120) <= 4
    series.add(100.0 + 1e6, 5.0, 0.0)
    assert len(series.written) == KEPT_S * 2, "after a machine's sleep, the series has its full length"
