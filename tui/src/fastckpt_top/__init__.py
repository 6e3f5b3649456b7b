"""Live monitor for fastckpt: the rates of each rank and thread, against the target per GPU.

It reads the small shared segments that processes with fastckpt publish (docs/telemetry.md of the project) and imports
nothing of fastckpt, so that it can be installed separately and watch jobs in any environment.
"""

__version__ = "0.1.0"
