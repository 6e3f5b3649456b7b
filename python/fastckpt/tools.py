"""The storage that a job needs, and what a directory provides: planning, diagnosis, the target of the monitor."""

from __future__ import annotations

from fastckpt._api.probe import probe
from fastckpt._api.target import set_target
from fastckpt._core import Probe
from fastckpt._tools.doctor import Diagnosis, Finding, doctor
from fastckpt._tools.plan.plan import plan
from fastckpt._tools.plan.record import Plan

__all__ = ["Diagnosis", "Finding", "Plan", "Probe", "doctor", "plan", "probe", "set_target"]


def __dir__() -> list[str]:
    return sorted(__all__)
