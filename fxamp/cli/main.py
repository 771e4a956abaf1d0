"""``fxamp <command>`` and ``python -m fxamp <command>``.

A command is a module with ``SUMMARY`` (one line), ``add_arguments(parser)`` and ``run(options)``, which gives
the exit code; it is listed here.

====  =====================================================================
 0    what was asked for holds
 1    it does not (bits differ, a bound is passed, nothing can be exported), or the user's code raised
 2    wrong use: an unknown option, a factory that is not there
130   interrupted
====  =====================================================================
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from fxamp.cli import compare, demo, export, policy, report, show
from fxamp.cli.crash import describe
from fxamp.cli.factories import UsageError
from fxamp.errors import ArgumentError, ExportError
from fxamp.version import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, ModuleType] = MappingProxyType(
    {
        "report": report,
        "compare": compare,
        "export": export,
        "show": show,
        "policy": policy,
        "demo": demo,
    }
)
"""The commands by name, in the order of the help."""

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; without any, print the help.

    Args:
        arguments: What follows the program's name; by default those of this process.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
    except (UsageError, ArgumentError) as error:
        print(f"fxamp {options.command}: {error}", file=sys.stderr)
        return 2
    except ExportError as error:
        print(f"fxamp {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 0
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        print(describe(error), file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fxamp", description="torch.autocast, written into the graph.")
    parser.add_argument("--version", action="version", version=f"fxamp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="<command>")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=name)
    return parser
