"""The command line of the campaign."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from faults import mutants, page
from faults.campaign import ROOT, Campaign
from faults.row import TIERS
from faults.rows import rows


def main() -> int:
    """Run the requested rows; return 1 if a promise was broken or a mutant was not caught."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="Inject faults, and count the lost saves."
    )
    parser.add_argument("--tier", choices=TIERS, default="fast")
    parser.add_argument("--row", type=int, action="append", help="number of a row; repeat for several rows")
    parser.add_argument("--name", action="append", help="name of a row; repeat for several rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="file of results to continue and write")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--page", action="store_true", help="only write docs/reliability.md from --results")
    parser.add_argument("--no-rows", action="store_true", help="run only the mutants")
    parser.add_argument("--no-mutants", action="store_true", help="run only the rows")
    options = parser.parse_args()
    # The default warning filter for rows that are tests.
    os.environ.setdefault("PYTHONWARNINGS", "default")
    chosen = [
        row
        for row in rows().values()
        if (not options.row or row.number in options.row) and (not options.name or row.name in options.name)
    ]
    results = options.results or ROOT / "target" / "faults" / f"{options.tier}.json"
    if options.list:
        for row in chosen:
            print(f"{row.number:3} {row.name}: {row.promise}")
        return 0
    if options.page:
        page.write(results)
        return 0
    campaign = Campaign(results, options.tier, options.seed)
    wrong = missed = 0
    if not options.no_rows:
        wrong = campaign.run_rows(chosen)
    if not options.no_mutants:
        names = mutants.MUTANTS if len(chosen) == len(rows()) else {name for row in chosen for name in row.mutants}
        missed = campaign.run_mutants(chosen, sorted(names))
    print(f"{wrong} violations; {missed} mutants that a row has missed. {results}")
    return 1 if wrong or missed else 0
