from __future__ import annotations

from harness.dealing import dealt


def test_each_share_begins_with_slow_files_and_the_others_stay_in_their_order():
    tests = [*("a1", "a2", "b1", "b2", "b3", "c1", "c2", "d1", "d2", "e1", "f1", "f2")]
    slow = {"b2", "c1", "f1"}
    found = dealt(tests, 2, file=lambda test: test[0], slow=slow.__contains__)
    assert found == ["b1", "b2", "b3", "f1", "f2", "a1", "a2", "c1", "c2", "d1", "d2", "e1"]
    assert dealt(tests, 1, file=lambda test: test[0], slow=lambda _: False) == tests
