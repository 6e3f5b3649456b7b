"""The command line and its helpers: it uses the package like any other program."""
