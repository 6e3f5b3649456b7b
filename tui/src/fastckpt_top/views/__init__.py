"""The contents of the screen. Only `canvas` uses Textual; all other modules turn a model into lines of styled text."""
