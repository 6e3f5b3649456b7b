"""``python -m fastckpt`` is the command ``fastckpt``."""

import sys

from .cli import main

sys.exit(main())
