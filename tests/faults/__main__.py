"""The command line; see the docstring of the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import command

if __name__ == "__main__":
    sys.exit(command.main())
