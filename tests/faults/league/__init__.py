"""Injects the same faults into several checkpoint libraries, each used as documented."""
