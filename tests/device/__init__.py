"""Tests of tensors on a device: pytest runs these files on the stand-in, ``python -m unittest`` runs them on a GPU.

The tests need only the standard library, numpy, torch and fastckpt: see :mod:`harness.devices`.
"""
