"""The line that asks the user for a word."""

from __future__ import annotations

from textual.widgets import Input


class Prompt(Input):
    """A line for input at the bottom, shown only during input.

    Attributes:
        asking: The question; empty if there is none.
    """

    DEFAULT_CSS = """
    Prompt { dock: bottom; display: none; }
    Prompt.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(compact=True)
        self.asking = ""

    def ask(self, what: str, hint: str, value: str = "") -> None:
        """Ask.

        Args:
            what: Becomes `asking`.
            hint: Shown while nothing is typed.
            value: To begin with.
        """
        self.asking = what
        self.placeholder = hint
        self.value = value
        self.add_class("-shown")
        self.focus()

    def close(self) -> str:
        """Ask no more.

        Returns:
            The answer.
        """
        asked, self.asking = self.asking, ""
        self.remove_class("-shown")
        self.screen.set_focus(None)
        return asked
