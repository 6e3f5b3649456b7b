"""The label of a save or load of several ranks: the coordinator draws it, and each rank gets it with its plan.

Ranks cannot count these calls: if a rank's planner raises, it never reaches the storage, and no other rank notices.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from typing import Any

#: ``label``: the label that came with the last plan that this thread received.
_here = threading.local()


class Label(str):
    """A label in the ``storage_data`` of a plan.

    The thread that unpickles a label records it, because a planner that keeps plans for later saves drops the new label
    and returns a plan with the label of an earlier save.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _received, (str(self),)


def _received(text: str) -> Label:
    _here.label = Label(text)
    return _here.label  # type: ignore[no-any-return]


def forget() -> None:
    """Forget the label of an earlier call, because a save or a load begins in this thread."""
    _here.label = None


def labelled(plans: list[Any]) -> list[Any]:
    """The plans of all ranks, with one label that is unique to this call."""
    label = _received(secrets.token_hex(8))
    return [dataclasses.replace(plan, storage_data=label) for plan in plans]


def label_of(plan: Any) -> Label | None:
    """The label of the save or the load that a plan belongs to; None if the coordinator gave none."""
    label = getattr(_here, "label", None) or plan.storage_data
    return label if isinstance(label, Label) else None
