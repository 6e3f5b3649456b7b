"""``python -m fastckpt_top``."""

import sys

from fastckpt_top.cli import main

if __name__ == "__main__":
    sys.exit(main())
