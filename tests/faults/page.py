"""docs/reliability.md."""


def write(path):
    raise SystemExit("not yet")
