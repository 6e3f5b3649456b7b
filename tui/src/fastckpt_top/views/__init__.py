"""The contents of the screen. `canvas` alone knows Textual; everything else turns a model into lines of styled text."""
