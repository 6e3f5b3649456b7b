"""What the scripts of benchmarks/ share: states, contenders, processes, rounds, accounts, bars, tables, plots.

GB is 10^9 bytes and MB 10^6 throughout; MiB, where it is meant, is said.
"""

from __future__ import annotations

GB = 10**9
MB = 10**6
MIB = 2**20
# What the raw device is measured with, and what direct reads of the benchmark itself use.
BLOCK = 4 * MIB
IN_FLIGHT = 8
