"""Measures how fast checkpoints are saved and loaded in a directory: ``fastckpt bench DIR``.

:mod:`command` reads the options and prints the result; :mod:`shapes` defines the state of each rank and :mod:`room`
checks that it fits; :mod:`rounds` runs the operations in order, in processes that :mod:`ranks` starts and that run
:mod:`rank`; :mod:`raw` moves the same bytes with plain I/O, :mod:`caches` makes files cold and hot; :mod:`scores` only
evaluates the samples; :mod:`text` and :mod:`picture` show the result.
"""
