"""A campaign of faults, with a row for each promise.

    python -m tests.faults --tier fast
    python -m tests.faults --tier nightly --row 4 --seed 7

A row (``rows/``) has the promise, the injected fault, the number of trials, its control, and
the mutants of the product (``mutants.py``) that it must catch. Some rows have their own trials; other rows are tests
that the gate also runs, and the campaign counts these tests. The result is one JSON document, from which ``page.py``
makes docs/reliability.md.
"""
