"""The same faults over the libraries that people save checkpoints with, each used in the way that it documents."""
