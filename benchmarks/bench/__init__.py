"""Modules that the scripts in benchmarks/ share: states, contenders, processes, rounds, figures, bars, tables, plots.

GB is 10^9 bytes and MB 10^6 throughout; MiB is 2^20.
"""

from __future__ import annotations

GB = 10**9
MB = 10**6
MIB = 2**20
# The block size of the raw device's measurement and of the benchmark's own direct reads.
BLOCK = 4 * MIB
IN_FLIGHT = 8
