"""A reader in Python for platforms without the compiled core: the reading half of ``_core.pyi``, with buffered I/O."""
