"""Checks of everything that is published: scripts/release runs them on a release, tests/release on each build."""
