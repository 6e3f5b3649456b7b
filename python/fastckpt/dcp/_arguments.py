"""Arguments that the writer and the reader share."""

from __future__ import annotations

import math
from typing import Any


def check_timeout(operation: str, timeout: Any) -> float:
    """Seconds of silence that are waited for.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or without end.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{operation}: timeout must be a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"{operation}: timeout must be a number of seconds above 0, not {timeout!r}")
    return float(timeout)
