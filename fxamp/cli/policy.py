"""Print the rules of a policy: which operators are cast, to what, and why."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from fxamp.cli.factories import UsageError
from fxamp.cli.options import DTYPES, policy_of, write_json
from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.dispatcher import AUTOCAST_KEYS

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "the rules of a device type, or of a plan file, with their reasons"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxamp policy``."""
    parser.add_argument("device_type", nargs="?", metavar="TYPE", help=", ".join(sorted(AUTOCAST_KEYS)))
    parser.add_argument("--policy", metavar="PLAN", help="a plan file, instead of a device type")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="default: %(default)s")
    parser.add_argument("--torch-version", metavar="VERSION", help="the lists of an older torch")
    parser.add_argument("--everything-low", action="store_true", help="low but for norms and losses")
    parser.add_argument("--op", default="", metavar="TEXT", help="only operators with this in their names")
    parser.add_argument("--json", metavar="FILE", help="write the policy there; - is standard output")


def run(options: argparse.Namespace) -> int:
    """Print the policy; 1 if no operator is left to show."""
    policy = _policy(options)
    if options.json:
        write_json(policy.to_json(), options.json)
        if options.json == "-":
            return 0
    rules = [rule for op, rule in sorted(policy.rules.items()) if options.op in op]
    table = Table("operator", "rule", "why", box=None)
    for rule in rules:
        table.add_row(rule.op, rule.cast.value, rule.why)
    console = Console(highlight=False)
    console.print(repr(policy), markup=False)
    console.print(table)
    for override in policy.overrides:
        console.print(f"override: {override}", markup=False)
    return 0 if rules else 1


def _policy(options: argparse.Namespace) -> Policy:
    planned = policy_of(options)
    if (planned is None) == (options.device_type is None):
        raise UsageError("name a device type or, with --policy, a plan file")
    if planned is not None:
        return planned
    dtype: torch.dtype = DTYPES[options.dtype]
    try:
        if options.everything_low:
            return Policy.everything_low(options.device_type, dtype)
        return Policy.native(options.device_type, dtype, torch_version=options.torch_version)
    except PolicyError as error:
        raise UsageError(str(error)) from error
