"""Facts from a manager's report on its checkpoints."""


def at_remote(manager):
    """The steps in the manager's remote tier."""
    return [one.step for one in manager.checkpoints() if "remote" in one.tiers]


def kept(manager):
    """Why each of the manager's own checkpoints stays, by step."""
    return {one.step: [*one.kept_for["local"]] for one in manager.checkpoints() if "local" in one.tiers}


def pinned(manager):
    """The steps that are pinned."""
    return [one.step for one in manager.checkpoints() if one.pinned]
