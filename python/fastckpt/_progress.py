"""A progress bar over the core's ticks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def ticker(label: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback ``(done, total)``, in bytes, that moves a bar named ``label``; None when none is to be shown."""
    if not shown:
        yield None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only who wants a bar pays for it

    with tqdm(desc=label, unit="B", unit_scale=True, total=0) as bar:

        def tick(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield tick
