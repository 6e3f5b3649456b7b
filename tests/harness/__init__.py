"""What the reliability tests stand on: real seccomp filters, real mounts, strace, and an independent reader of the
format."""
