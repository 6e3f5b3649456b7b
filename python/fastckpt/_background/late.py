"""The tensors of devices that a lazy save copies after its call, and the steps that are about to change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt._tensors.movers import Copies


class Late:
    """The copies of one save, as a step sees them.

    A change before the first step is detected by the versions, which torch raises on the host when the change is
    requested. From the first step on, versions rise as they should, and the order on the device keeps the copies right:
    the streams of the step wait for them. So versions are compared once: by the first step, or when the copies have
    ended and no step has come by then.

    Args:
        versions: of each tensor its name, itself, and its version at the call.
    """

    __slots__ = ("_verdicts", "_versions", "copies")

    def __init__(self, versions: list[tuple[str, Any, int]]) -> None:
        self._versions = versions
        #: Only the first call counts.
        self._verdicts: list[list[str]] = []
        #: Copies requested from streams; the list is complete before the first step.
        self.copies: list[Copies] = []

    def changed(self) -> list[str]:
        """The names of the tensors that were changed between the call and the first step.

        No lock, because a signal handler may step on top of a step. Many steps may compare at a time: a step goes on
        only after it has appended its findings, so the first to append had compared before any step changed a version.
        """
        if not self._verdicts:
            self._verdicts.append(changed(self._versions))
        return self._verdicts[0]

    def hold_step(self) -> None:
        """Have the streams of the calling thread wait for the copies.

        Raises:
            RuntimeError: such a stream is being captured into a CUDA graph. The step must not go on.
        """
        for copies in self.copies:
            copies.hold_streams()
        self.changed()

    def forget(self) -> None:
        """Let go of the tensors; the verdict stays."""
        self.changed()
        self._versions.clear()


def versions_of(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
    """The names of tensors, these, and how often each has been changed."""
    return [(name, tensor, tensor._version) for name, tensor in tensors]  # noqa: SLF001 - no public name


def changed(versions: list[tuple[str, Any, int]]) -> list[str]:
    """The names of those that have been changed since.

    A version is raised after a tensor of the host has been written to. So a change that ended before its tensor was
    copied, or while it was, shows here, after the copy; and no permitted change shows, because a step that waits for
    the copy is still waiting. A change that is under way at this moment, and began before its tensor was copied, does
    not show.
    """
    # Of a DTensor, both that and the local one may have been.
    return list(dict.fromkeys(name for name, tensor, version in versions if tensor._version != version))  # noqa: SLF001
