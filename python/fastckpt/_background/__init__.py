"""Asynchronous saves: the snapshot, the handle on it, and the guard that waits for it."""
