"""Copies of checkpoints between directories and object stores."""
