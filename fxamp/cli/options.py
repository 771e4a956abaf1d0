"""The options that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fxamp.cli.factories import Made, UsageError, load, make
from fxamp.policy import Policy

__all__ = ["DTYPES", "add_model", "made_of", "policy_of", "write_json"]

DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, with which inputs, under which policy."""
    parser.add_argument(
        "model",
        metavar="FACTORY",
        help="torchvision:resnet18, timm:NAME, package.module:callable or path/to/file.py:callable, which "
        "gives a model or (model, inputs)",
    )
    parser.add_argument(
        "--inputs", metavar="FACTORY", help="a callable that gives the inputs, or a loader of them"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: what torch.autocast takes")
    parser.add_argument(
        "--device-type", metavar="TYPE", help="whose autocast; default: where the parameters are"
    )
    parser.add_argument("--policy", metavar="PLAN", help="a plan file (JSON) with the precision of operators")
    parser.add_argument("--train", action="store_true", help="in training mode; default: evaluation")
    parser.add_argument("--seed", type=int, default=0, help="of torch's generator; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is standard output")


def made_of(options: argparse.Namespace) -> Made:
    """The model and the inputs.

    Raises:
        UsageError: They cannot be had.
    """
    made = make(options.model, train=options.train, seed=options.seed)
    inputs = made.inputs
    if options.inputs is not None:
        torch.manual_seed(options.seed)
        inputs = load(options.inputs)
        inputs = inputs() if callable(inputs) else inputs
    if inputs is None:
        raise UsageError(
            f"{options.model} does not say what the model is called with\n"
            "  return (model, inputs) from it, or name a second callable:  --inputs path/to/file.py:callable"
        )
    return Made(made.model, inputs)


def policy_of(options: argparse.Namespace) -> Policy | None:
    """The policy of the plan file, if one is named."""
    if options.policy is None:
        return None
    if not Path(options.policy).is_file():
        raise UsageError(f"there is no file {options.policy}")
    return Policy.from_plan(options.policy)


def write_json(text: str, target: str) -> None:
    """Write *text* to the file *target*, or to standard output."""
    if target == "-":
        sys.stdout.write(f"{text}\n")
        return
    try:
        Path(target).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error
