"""Convert a model, run it once, and tell which operator runs in which dtype and why."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from fxamp.api import convert
from fxamp.cli.factories import UsageError
from fxamp.cli.options import DTYPES, add_model, made_of, policy_of, write_json
from fxamp.compare.inputs import items_of

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "which operator runs in which dtype and why, which casts are made, what stays eager"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxamp report``."""
    add_model(parser)
    parser.add_argument("--plan", metavar="FILE", help="write the plan there, to be used with --policy")


def run(options: argparse.Namespace) -> int:
    """Report; always 0."""
    made, policy = made_of(options), policy_of(options)
    amp = convert(
        made.model,
        device_type=None if policy else options.device_type,
        dtype=DTYPES.get(options.dtype) if policy is None else None,
        policy=policy,
    )
    item = next(items_of(made.inputs, made.model))
    with torch.set_grad_enabled(options.train):
        amp(*item.args, **item.kwargs)
        if amp.eager_modules:
            amp(*item.args, **item.kwargs)  # captures the modules below them
    if options.plan:
        try:
            amp.plan().write(options.plan)
        except OSError as error:
            raise UsageError(f"cannot write {options.plan}: {error.strerror}") from error
    report = amp.report()
    if options.json:
        write_json(report.to_json(), options.json)
    if options.json != "-":
        console = Console(highlight=False)
        console.print(
            report if console.is_terminal else str(report), markup=False, soft_wrap=not console.is_terminal
        )
    return 0
