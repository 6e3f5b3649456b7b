"""Locates and copies the bytes of tensors: torch, numpy, host memory, devices."""
