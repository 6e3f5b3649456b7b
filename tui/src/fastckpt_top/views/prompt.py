"""The line that asks the user for a filter."""

from __future__ import annotations

from textual.widgets import Input


class Prompt(Input):
    """A line for input at the bottom, shown only during input.

    Attributes:
        asking: Whether the prompt is shown.
    """

    DEFAULT_CSS = """
    Prompt { dock: bottom; display: none; }
    Prompt.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(placeholder="filter: rank, pid, job, label, state", compact=True)
        self.asking = False

    def ask(self, value: str) -> None:
        """Show the prompt with an initial value."""
        self.asking = True
        self.value = value
        self.add_class("-shown")
        self.focus()

    def close(self) -> None:
        """Hide the prompt."""
        self.asking = False
        self.remove_class("-shown")
        self.screen.set_focus(None)
