"""Questions that the first process of a program on accelerate answers for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds after which the first process says that it is still looking: a broadcast may take ten minutes by default, and
#: to verify a checkpoint may take longer.
_BEAT = 60.0


def of_first(accelerator: Any, find: Callable[[], Any]) -> Any:
    """What ``find`` returns, or raises, on the first process; all processes call it."""
    if accelerator.num_processes == 1:
        return find()
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(find) if accelerator.is_main_process else None
        while True:
            said: list[Any] = [None, None, None]
            if looking is not None and wait([looking], _BEAT).done:
                error = looking.exception()
                said = [True, error, None if error else looking.result()]
            ended, error, found = broadcast_object_list(said)
            if ended:
                if error is not None:
                    raise error
                return found
