"""Runs a part of a row in a separate process: ``python -m faults.inside NAME``, with a JSON object of its arguments."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

from faults.row import EnoughError, Run
from faults.rows import rows


def _cpu() -> float:
    """Return the CPU seconds of this process and of the processes that it waited for, whatever the other load."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


def main() -> int:
    """Run the part and write its result to the file ``to``."""
    name, text = sys.argv[1:]
    given = json.loads(text)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastckpt-faults-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        run = Run(given["tier"], given["seed"], given["trials"], Path(folder), given["most"])
        try:
            rows()[name].run(run)
        except EnoughError:
            pass
        except Exception:  # noqa: BLE001 - a row that ends by itself is a violation
            run.violations.append(traceback.format_exc()[-3000:])
            traceback.print_exc()
    result = {
        "seed": run.seed,
        "trials": run.made,
        "violations": run.violations,
        "details": run.details,
        "seconds": round(time.monotonic() - began, 1),
        "cpu": round(_cpu(), 1),
    }
    Path(given["to"]).write_text(json.dumps(result), encoding="utf-8")
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
