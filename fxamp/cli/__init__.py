"""The command line: one module a command, listed in :mod:`fxamp.cli.main`."""
