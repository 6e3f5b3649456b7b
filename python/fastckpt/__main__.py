"""``python -m fastckpt`` is the command ``fastckpt``."""

import sys

from fastckpt._tools.cli import main

sys.exit(main())
