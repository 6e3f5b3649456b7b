"""What is true of everything that is published: scripts/release asks it of a release, tests/release of each build."""
