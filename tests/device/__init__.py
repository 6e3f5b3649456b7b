"""Tests of tensors on a device: the same files on the stand-in by pytest and on a GPU by ``python -m unittest``.

They need the standard library, numpy, torch and fastckpt, and nothing else: see :mod:`harness.devices`.
"""
