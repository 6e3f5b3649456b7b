"""The command line and its own helpers: it uses the package as any program does."""
