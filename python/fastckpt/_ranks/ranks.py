"""The ranks that save and load together: ``ranks=``, one record of options for every call of several ranks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, get_args

from fastckpt._api.options import one_of
from fastckpt._api.settings import record_of

#: Seconds for which a rank may make no progress.
TIMEOUT = 600.0
#: Three years. Clocks, and torch's conversion of seconds, overflow somewhere beyond.
_LONGEST = 1e8

Replicas = Literal["sample", "full", "first"]
OnDifference = Literal["raise", "warn"]


@record_of("ranks", "fastckpt.distributed.Ranks")
@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save or load together: the ``ranks=`` of every common call.

    A process group is short for a ``Ranks``: ``ranks=group`` is ``ranks=Ranks(group)``. Pass the same on all ranks.

    Args:
        process_group: a process group of ``torch.distributed``, or None for the default one; without an initialised
            group, only this process. It must have all ranks of the DTensors' meshes.
        timeout: seconds without progress of a rank after which all fail. For a late rank they count from the arrival of
            the first rank.
        replicas: for saves: how copies on several ranks are compared before anything is written, DTensors and plain
            tensors alike: ``sample`` compares start, middle, end, and a random place in every 4 MiB of each part, and
            all of parts up to 64 KiB; ``full`` compares all bytes; ``first`` saves every part from the lowest rank that
            has it, and compares nothing. Tensors with one name on separate groups of ranks are always compared whole.
            docs/distributed.md lists the cost and the guarantee of each.
        on_difference: for saves: how to react to a difference: ``raise``, or ``warn``, which saves the different
            tensors whole from the lowest rank that has them, and names them in ``warnings`` of the report.

    Raises:
        TypeError: ``timeout`` is not a number.
        ValueError: an option is out of range.

    Example:
        >>> import fastckpt.distributed, numpy
        >>> ranks = fastckpt.distributed.Ranks(timeout=60, replicas="full")
        >>> fastckpt.distributed.save({"w": numpy.ones(3)}, "step-7", ranks=ranks).tensors
        1
    """

    process_group: Any = None
    _: KW_ONLY
    timeout: float = TIMEOUT
    replicas: Replicas = "sample"
    on_difference: OnDifference = "raise"

    def __post_init__(self) -> None:
        given: Any = self.timeout
        if isinstance(given, bool) or not isinstance(given, Real):
            raise TypeError(f"Ranks: timeout must be a number of seconds, not {type(given).__name__}")
        if not 0 < self.timeout <= _LONGEST:
            raise ValueError(
                f"Ranks: timeout must be above 0 and at most {_LONGEST:,.0f} seconds, not {self.timeout!r}"
            )
        object.__setattr__(self, "timeout", float(self.timeout))
        for name, words in (("replicas", get_args(Replicas)), ("on_difference", get_args(OnDifference))):
            object.__setattr__(self, name, one_of(name, words)("Ranks", getattr(self, name)))


def alike(ranks: Ranks) -> dict[str, Any]:
    """The options that must be equal on all ranks, by their names in errors."""
    return {"replicas=": ranks.replicas, "on_difference=": ranks.on_difference}


def check_ranks(operation: str, ranks: Any) -> Ranks:
    """``ranks=``: a ``Ranks``, or a process group, which the session checks further."""
    if isinstance(ranks, str):
        raise TypeError(
            f"{operation}: ranks must be a process group of torch.distributed, a Ranks or None, not {ranks!r}"
        )
    return ranks if isinstance(ranks, Ranks) else Ranks(ranks)
