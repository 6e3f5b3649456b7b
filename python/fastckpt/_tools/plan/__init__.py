"""Plans before the hardware exists: the size of checkpoints, the interval between them, the speed of the storage.

``architectures`` counts a model's parameters, ``sizing`` the bytes of a checkpoint; ``layout`` computes which rank
writes and reads them, ``fastckpt._interval`` has the standard formulas. ``plan`` puts these together in a ``record``,
``sweep`` repeats it, ``sweep_table`` and ``plots`` show it. ``simulate`` compares the formulas with months of simulated
training. ``command`` and ``simulate_command`` are the command line.
"""
