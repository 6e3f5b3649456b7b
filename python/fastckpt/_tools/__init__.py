"""The command line and what it alone needs: it uses the package as any program does."""
