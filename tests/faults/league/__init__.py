"""The same faults for libraries that save checkpoints, each used as documented."""
