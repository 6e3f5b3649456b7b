"""What survives: one campaign of faults, a row for each promise.

    python -m tests.faults --tier fast
    python -m tests.faults --tier nightly --row 4 --seed 7

A row (``rows/``) says what is promised, which fault is injected, how many trials there are, what its control is, and
which mutants of the product (``mutants.py``) it must catch. Some rows have trials of their own; others are tests that
the gate runs anyway, and the campaign counts those. The result is one JSON document, of which ``page.py`` makes
docs/reliability.md.
"""
