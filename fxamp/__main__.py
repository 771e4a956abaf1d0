"""The command line: ``python -m fxamp <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fxamp import __version__, demo

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; without any, print the help.

    Args:
        arguments: What follows the program's name; by default those of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser("python -m fxamp", description="torch.autocast, written into the graph.")
    parser.add_argument("--version", action="version", version=f"fxamp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="<command>")

    command = commands.add_parser(
        "demo", help="train a small network under autocast and through fxamp, and compare the bits"
    )
    demo.add_arguments(command)
    command.set_defaults(run=demo.command)

    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
