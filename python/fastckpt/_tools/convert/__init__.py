"""Conversion between checkpoints and other formats."""
