"""Live monitor for fastckpt: what each rank and thread moves, against the target per GPU.

It reads the small shared segments that processes with fastckpt publish (docs/telemetry.md of the project) and
imports nothing of fastckpt, so that it can be installed alone and watch jobs of any environment.
"""

__version__ = "0.1.0"
