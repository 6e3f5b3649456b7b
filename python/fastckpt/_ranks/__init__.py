"""Many processes write and read one checkpoint: the implementation of ``fastckpt.distributed`` and ``fastckpt.dcp``."""
