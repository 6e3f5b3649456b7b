"""A reader in Python for platforms without the compiled core: the reading half of ``_core.pyi``, by buffered I/O."""
