"""The order in which workers take tests.

pytest-xdist gives each worker an equal share of the list, and an idle worker takes tests from the end of another share.
If a long test runs last, the other cores are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Test = TypeVar("Test")


def dealt(
    tests: Sequence[Test], workers: int, *, file: Callable[[Test], Hashable], slow: Callable[[Test], bool]
) -> list[Test]:
    """``tests`` sorted so that each share begins with files that have slow tests. The other files keep their order:
    the files of a folder share fixtures, so one worker should run them."""
    files: dict[Hashable, list[Test]] = {}
    for test in tests:
        files.setdefault(file(test), []).append(test)
    long = {name for name, several in files.items() if any(map(slow, several))}
    first = [files[name] for name in files if name in long]
    shares = [[test for several in first[number::workers] for test in several] for number in range(workers)]
    at = 0
    for name, several in files.items():
        if name not in long:
            while at < workers - 1 and len(shares[at]) >= len(tests) / workers:
                at += 1
            shares[at] += several
    return [test for share in shares for test in share]
