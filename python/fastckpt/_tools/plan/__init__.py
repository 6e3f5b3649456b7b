"""Arithmetic before hardware: how big checkpoints are, how often they are due, how fast storage has to be.

``units`` are quantities as people write them; ``architectures`` counts a model's parameters, ``sizing`` the bytes of a
checkpoint; ``layout`` knows who writes and reads them, ``interval`` the formulas of the field. ``plan`` puts these
together, ``sweep`` does so many times, ``text`` and ``plots`` show it. ``simulate`` holds the formulas against months
of training. ``command`` and ``simulate_command`` are the command line.
"""
