"""Random states of Python, numpy and torch."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from fastckpt._state.builders import torch_for


class Randomness:
    """The global random generators of this process, as an object with a state; made by :func:`fastckpt.randomness`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of Python, numpy and, if it was imported, torch on all devices in use."""
        torchs = torch_for("random states").random_states() if "torch" in sys.modules else {}
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torchs}  # noqa: NPY002 - the global one

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators to the states that a call of :meth:`state_dict` returned.

        Args:
            state: the result of :meth:`state_dict`. Generators of missing devices are left out.
        """
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 - the global one
        if state["torch"]:
            torch_for("random states").set_random_states(state["torch"])


def randomness() -> Randomness:
    """Make the random generators of Python, numpy and torch a part of a state.

    In a job each rank has its own random state: pass it in ``per_rank``.

    Returns:
        An object with ``state_dict`` and ``load_state_dict``: a save stores the states of the global generators at that
        moment; ``into`` of a load, or its ``load_state_dict``, restores them.

    Example:
        >>> import fastckpt, random
        >>> _ = fastckpt.save({"random": fastckpt.randomness()}, "step-7")
        >>> first = random.random()
        >>> _ = fastckpt.load("step-7", into={"random": fastckpt.randomness()})
        >>> random.random() == first
        True
    """
    return Randomness()
