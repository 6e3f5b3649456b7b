"""Where the bytes of tensors lie, and how they are copied: torch, numpy, host memory, devices."""
