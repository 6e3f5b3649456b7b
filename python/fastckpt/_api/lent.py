"""Pinned staging memory lent to the core for one operation, with warnings for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .host_memory import staging

if TYPE_CHECKING:
    from fastckpt import _core

    from .host_memory import Memory


class Lent:
    """The memory lent to one operation.

    Attributes:
        core: the memory, in the core's form; None if no device takes part: the core then uses its own memory.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._memory = memory
        self.core: _core.Memory | None = None if memory is None else memory.core

    @property
    def warnings(self) -> list[str]:
        """A warning for the report, if the memory could not be pinned."""
        problem = None if self._memory is None else self._memory.problem
        return [problem] if problem else []


@contextmanager
def lent(devices: Sequence[Any], nbytes: int) -> Iterator[Lent]:
    """A context with staging memory for an operation that moves ``nbytes`` from or to ``devices``."""
    with ExitStack() as stack:
        memory = None
        # The portable core reads into its own memory.
        with suppress(NotImplementedError):
            memory = stack.enter_context(staging(devices, nbytes))
        yield Lent(memory)
