"""Power cuts on real file systems: all that a device with a volatile cache may have kept at any moment."""
