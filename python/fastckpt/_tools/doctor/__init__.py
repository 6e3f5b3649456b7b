"""Diagnoses a directory for checkpoints: facts are gathered, judged, and shown, each in a separate file.

:mod:`facts` gathers, :mod:`measure` times, :mod:`findings` and :mod:`ring` judge by the facts only, and :mod:`command`
shows the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastckpt._paths import AnyPath

__all__ = ["Diagnosis", "Finding", "doctor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, or one possible improvement.

    Attributes:
        code: a stable name, such as ``io_uring-seccomp``; ``docs/doctor.md`` lists all codes.
        level: ``error`` (no checkpoint can be made here), ``warning`` (it works, but slower or less safely than
            possible), ``note`` (information).
        text: the finding, in a sentence.
        evidence: the facts behind it.
        remedies: what to change, by place: ``docker``, ``podman``, ``kubernetes``, ``slurm``, ``host``, or ``any``.
    """

    code: str
    level: str
    text: str
    evidence: tuple[str, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of :func:`doctor`.

    Attributes:
        status: 0 for all well, 1 for warnings, 2 if no checkpoint can be made; also the command's exit status.
        verdict: the status in a sentence.
        engine: the engine of a save with ``io="auto"`` (or ``FASTCKPT_IO``) here: ``uring``, ``threads`` or
            ``buffered``.
        why: the reason for the engine.
        findings: the worst first.
        facts: everything that was examined, as JSON values; ``docs/doctor.md`` describes the keys. Sizes are bytes,
            speeds GB/s of 10^9 bytes.
    """

    status: int
    verdict: str
    engine: str
    why: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        """Return the whole diagnosis as JSON values."""
        return {**asdict(self), "findings": [asdict(finding) for finding in self.findings]}


def doctor(path: AnyPath = ".", *, probe: bool = True) -> Diagnosis:
    """Report how checkpoints in a directory are written and read, what slows them down, and how to change that.

    It takes about 3 s with the measurement, less than 1 s without. It uses temporary files in the directory, of at most
    a tenth of its free space and 256 MiB, and removes them even if it is interrupted. It does not import torch.

    Args:
        path: the directory that holds the checkpoints. If it does not exist, a finding reports that.
        probe: measure as well: write and read for about two seconds, with plain I/O and through :func:`fastckpt.save`
            and :func:`fastckpt.load`.

    Returns:
        The diagnosis. Problems with the directory are findings, not exceptions.

    Raises:
        ValueError: ``FASTCKPT_IO`` names no engine, or ``path`` is a URL.

    Example:
        >>> import fastckpt
        >>> found = fastckpt.tools.doctor(".", probe=False)
        >>> found.status in (0, 1) and found.engine in ("uring", "threads", "buffered")
        True
    """
    # Imported here, so that importing fastckpt stays fast.
    from . import facts, findings  # noqa: PLC0415

    return findings.diagnose(facts.collect(os.fsdecode(path), measured=probe))
