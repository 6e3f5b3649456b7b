"""The command: see the package."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "python")]

from faults import command  # noqa: E402 - found there

if __name__ == "__main__":
    sys.exit(command.main())
