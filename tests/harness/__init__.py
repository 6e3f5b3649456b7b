"""The tools of the reliability tests: real seccomp filters, real mounts, strace, and an independent reader of the
format."""

import os

if os.environ.get("FASTCKPT_TEST_PORTABLE"):
    from . import portable  # noqa: F401 - before anybody imports fastckpt
