"""The user's choices: view, selection, sorting, filter. It stores the order of the rows, and is otherwise pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.rows import Row

VIEWS: Final = ("live", "threads", "history", "events")
SORTS: Final = {"worst": "slowest first", "rank": "by rank"}
"""Orders of the ranks, and the name of each."""
PINNED: Final = 40.0
"""A row moves above another only if its `Row.worst` is greater by more than this: a tenth of a target, or of the time
left, is noise."""


@dataclass(slots=True)
class Ui:
    """The user's choices.

    Attributes:
        view: One of `VIEWS`.
        selected: Key of the selected row; empty to follow the worst.
        sort: One of `SORTS`.
        filter: Only rows whose rank, pid, job, label, state or engine contains this.
        graph: Whether to show a graph if there is room.
        help: Whether the help is shown.
        recording: File being recorded to; empty if none.
        notice: A message for the line above the keys; empty if none.
        interval: Seconds between two looks.
        scroll: First line shown, by view.
        job: Key of the shown job; empty for the most important one.
        zoom_s: Seconds that the graph shows; 0 until the user chooses.
        order: Keys of the rows in their last order, the worst first.
    """

    view: str = "live"
    selected: str = ""
    sort: str = "worst"
    filter: str = ""
    graph: bool = True
    help: bool = False
    recording: str = ""
    notice: str = ""
    interval: float = 0.5
    scroll: dict[str, int] = field(default_factory=dict)
    job: str = ""
    zoom_s: float = 0.0
    order: list[str] = field(default_factory=list)

    def job_of(self, model: Model) -> str:
        """Key of the visible job: the chosen one while it exists, else the first; empty without any."""
        keys = [job.key for job in model.jobs]
        return self.job if self.job in keys else keys[0] if keys else ""

    def shown(self, model: Model) -> list[Row]:
        """The rows of the shown job, filtered and sorted."""
        job = self.job_of(model)
        return self.rows([row for row in model.rows if not job or row.job_key == job])

    def rows(self, rows: list[Row]) -> list[Row]:
        """Filter and sort."""
        pinned = pin(rows, self.order)
        self.order = [row.key for row in pinned]
        return [row for row in (pinned if self.sort == "worst" else rows) if self._matches(row)]

    def selection(self, rows: list[Row]) -> Row | None:
        """The selected one of the shown rows.

        If its operation ended, this is another row of its process; if no row was chosen or it is gone, the worst one.
        """
        process = self.selected.partition("/")[0]
        for row in rows:
            if row.key == self.selected:
                return row
        for row in rows:
            if process and row.proc_key == process:
                return row
        places = {key: place for place, key in enumerate(self.order)}
        return min(rows, key=lambda row: places.get(row.key, len(places)), default=None)

    def clear(self) -> None:
        """Show all rows, and follow the worst again."""
        self.filter = self.selected = ""

    def _matches(self, row: Row) -> bool:
        if not self.filter:
            return True
        wanted = self.filter.lower()
        if wanted.isdigit() and row.rank is not None and len(wanted) < 4:  # noqa: PLR2004  (a short number is a rank, or part of a label)
            return int(wanted) == row.rank or wanted in row.label.lower()
        words = (row.name, str(row.pid), row.job, row.label, row.state, row.engine, row.kind)
        return any(wanted in word.lower() for word in words)


def pin(rows: list[Row], order: list[str]) -> list[Row]:
    """Put rows in order, the worst first, and move as few of them as possible.

    Args:
        rows: Rows, in order of rank.
        order: Keys of the order so far.

    Returns:
        The rows. No row is above one that is worse by more than `PINNED`; a row moves only if that requires it. New
        rows, even of ended operations, are above faster ones.
    """
    places = {key: place for place, key in enumerate(order)}
    known = sorted((row for row in rows if row.key in places), key=lambda row: places[row.key])
    made: list[Row] = []
    least = float("inf")
    for row in known:
        if row.worst > least + PINNED:
            at = next(index for index, above in enumerate(made) if row.worst > above.worst + PINNED)
            made.insert(at, row)
        else:
            made.append(row)
        least = min(least, row.worst)
    for row in (row for row in rows if row.key not in places):
        made.insert(next((index for index, above in enumerate(made) if _behind(row, above)), len(made)), row)
    return made


def _behind(row: Row, above: Row) -> bool:
    """Whether a new row belongs above another: it is worse, or equally bad and slower."""
    return (row.worst, -_reached(row)) > (above.worst, -_reached(above))


def _reached(row: Row) -> float:
    return row.average / row.target if row.average is not None and row.target else float("inf")
