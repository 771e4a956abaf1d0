"""The command line: ``python -m fxamp <command>``."""

from __future__ import annotations

import sys

from fxamp.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
