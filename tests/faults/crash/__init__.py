"""Power cuts on real file systems: the states that a device with a volatile cache may have at any moment."""
