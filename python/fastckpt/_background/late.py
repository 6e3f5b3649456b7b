"""The device tensors that a lazy save copies after its call, and the steps that are about to change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt._tensors.movers import Copies


class Late:
    """The copies of one save, for which steps wait.

    A change before the first step shows in the versions, which torch raises on the host when the change is requested.
    From the first step on, versions may rise, and the order on the device protects the copies: the streams of the step
    wait for them. So versions are compared once: by the first step, or at the end of the copies if no step has come.

    Args:
        versions: for each tensor its name, the tensor, and its version at the call.
    """

    __slots__ = ("_verdicts", "_versions", "copies")

    def __init__(self, versions: list[tuple[str, Any, int]]) -> None:
        self._versions = versions
        #: The results of comparisons, of which only the first counts.
        self._verdicts: list[list[str]] = []
        #: Copies requested from streams; the list is complete before the first step.
        self.copies: list[Copies] = []

    def changed(self) -> list[str]:
        """The names of the tensors that were changed between the call and the first step.

        It takes no lock: a signal handler may step within a step. Many steps may compare at a time: each continues only
        after it has appended its result, so the first result comes from before any step changed a version.
        """
        if not self._verdicts:
            self._verdicts.append(changed(self._versions))
        return self._verdicts[0]

    def hold_step(self) -> None:
        """Make the streams of the calling thread wait for the copies.

        Raises:
            RuntimeError: one of these streams is being captured into a CUDA graph. The step must not continue.
        """
        for copies in self.copies:
            copies.hold_streams()
        self.changed()

    def forget(self) -> None:
        """Release the tensors; the result stays."""
        self.changed()
        self._versions.clear()


def versions_of(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
    """The name, the tensor and its version, for each of these tensors."""
    return [(name, tensor, tensor._version) for name, tensor in tensors]  # noqa: SLF001 - no public name


def changed(versions: list[tuple[str, Any, int]]) -> list[str]:
    """The names of the tensors that have changed since.

    A version is raised after a host tensor has been written to. So a change that ended before or during the copy of its
    tensor shows here, after the copy; and no permitted change shows, because the steps still wait for the copy. A
    change that is in progress at this moment, and began before its tensor was copied, does not show.
    """
    # A DTensor and its local tensor may both have changed.
    return list(dict.fromkeys(name for name, tensor, version in versions if tensor._version != version))  # noqa: SLF001
