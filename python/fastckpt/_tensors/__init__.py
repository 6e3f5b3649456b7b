"""Where the bytes of tensors are, and how they are copied: torch, numpy, host memory, devices."""
