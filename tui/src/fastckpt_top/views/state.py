"""What the user chose: view, selection, sorting, filter. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt_top.rows import Row

VIEWS: Final = ("live", "threads", "history", "events")
SORTS: Final = ("rank", "rate", "target", "done", "eta", "state", "pid")
MODES: Final = ("current", "average", "total")
LAYOUTS: Final = ("all", "ranks", "graph")
"""Everything; without the graph; the graph alone."""


def _last(value: float | None) -> float:
    return float("-inf") if value is None else value


_KEYS: Final[dict[str, Callable[[Row], tuple[float | str, ...]]]] = {
    "rank": lambda row: (_last(row.rank) if row.rank is not None else float("inf"),),
    "rate": lambda row: (-_last(row.rate if row.rate is not None else row.average),),
    "target": lambda row: (-_last(row.average / row.target if row.average is not None and row.target else None),),
    "done": lambda row: (-_last(row.progress),),
    "eta": lambda row: (-_last(row.eta_s),),
    "state": lambda row: (row.state,),
    "pid": lambda row: (row.pid,),
}


@dataclass(slots=True)
class Ui:
    """The user's choices.

    Attributes:
        view: One of `VIEWS`.
        selected: Key of the selected row; empty for the first.
        sort: One of `SORTS`.
        reverse: Sort the other way round.
        filter: Only rows whose rank, pid, job, label, state or engine contains this.
        all_threads: Show the threads of each rank.
        expanded: Process keys whose threads are shown.
        active_only: Only rows with a running operation.
        mode: What the GB/s column shows, one of `MODES`.
        layout: What the live view shows: one of `LAYOUTS`.
        paused: The table stands still.
        frozen: The rows it stands still with.
        help: The help is shown.
        recording: File being recorded to; empty if none.
        notice: A message for the line above the keys; empty if none.
        interval: Seconds between two looks.
        scroll: First line shown, by view.
        job: Key of the job that is shown; empty for the one that matters most.
        zoom_s: Seconds that the graph shows; 0 for as many as it has columns.
    """

    view: str = "live"
    selected: str = ""
    sort: str = "rank"
    reverse: bool = False
    filter: str = ""
    all_threads: bool = False
    expanded: set[str] = field(default_factory=set)
    active_only: bool = False
    mode: str = "current"
    layout: str = "all"
    paused: bool = False
    frozen: list[Row] = field(default_factory=list)
    help: bool = False
    recording: str = ""
    notice: str = ""
    interval: float = 0.5
    scroll: dict[str, int] = field(default_factory=dict)
    job: str = ""
    zoom_s: float = 0.0

    def rows(self, rows: list[Row]) -> list[Row]:
        """Filter and sort.

        Args:
            rows: All rows, in order of rank.
        """
        if self.paused:
            rows = self.frozen
        shown = [row for row in rows if self._matches(row) and (row.running or not self.active_only)]
        return sorted(shown, key=_KEYS[self.sort], reverse=self.reverse)

    def selection(self, rows: list[Row]) -> Row | None:
        """The selected row of those shown; the same process's where its operation has ended; else the first."""
        for row in rows:
            if row.key == self.selected:
                return row
        process = self.selected.partition("/")[0]
        return next((row for row in rows if row.proc_key == process), rows[0] if rows else None)

    def open(self, row: Row) -> bool:
        """Whether a row's threads are shown."""
        return self.all_threads or row.proc_key in self.expanded

    def _matches(self, row: Row) -> bool:
        if not self.filter:
            return True
        wanted = self.filter.lower()
        if wanted.isdigit() and row.rank is not None and len(wanted) < 4:  # noqa: PLR2004  (a short number is a rank, or part of a label)
            return int(wanted) == row.rank or wanted in row.label.lower()
        words = (row.name, str(row.pid), row.job, row.label, row.state, row.engine, row.kind)
        return any(wanted in word.lower() for word in words)
