"""The command line and its helpers, which use the package as any other program does."""
