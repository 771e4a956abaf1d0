"""Tell what an exported file holds: dtypes, weights, versions, what was checked."""

from __future__ import annotations

import argparse
import json

from fxamp.cli.factories import UsageError
from fxamp.cli.options import write_json
from fxamp.errors import ExportError
from fxamp.export import read_artifact

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "what an exported file says about itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxamp show``."""
    parser.add_argument("file", metavar="FILE", help="what fxamp export has written")
    parser.add_argument("--json", metavar="FILE", help="write all of it there; - is standard output")
    parser.add_argument("--plan", metavar="FILE", help="write its precision plan there, for --policy")


def run(options: argparse.Namespace) -> int:
    """Show it; always 0."""
    try:
        artifact = read_artifact(options.file)
    except ExportError as error:
        raise UsageError(str(error)) from error
    if options.plan:
        write_json(json.dumps(dict(artifact.policy), indent=1), options.plan)
    if options.json:
        write_json(artifact.to_json(), options.json)
    if options.json != "-":
        print(artifact)
    return 0
