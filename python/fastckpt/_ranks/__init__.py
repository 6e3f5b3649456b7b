"""Many processes write and read one checkpoint: what is below ``fastckpt.distributed`` and ``fastckpt.dcp``."""
