"""Object stores: the objects below a URL, and checkpoints among them (docs/stores.md)."""
