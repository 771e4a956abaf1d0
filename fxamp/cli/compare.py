"""Run a model under autocast beside float32, operator by operator; the worst operators first.

The exit code is 1 if the converted model has not the bits of eager autocast, if a result is Inf or NaN where
float32 is finite, or if a bound is passed.
"""

from __future__ import annotations

import argparse
import math
import sys

from rich.console import Console

from fxamp.cli.options import DTYPES, add_model, made_of, policy_of, write_json
from fxamp.compare import Comparison
from fxamp.compare import compare as compare_models

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "which operator loses the accuracy, where the first Inf comes from, and are the bits eager's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxamp compare``."""
    add_model(parser)
    parser.add_argument(
        "--against",
        nargs="+",
        choices=["autocast", "float32", "float64"],
        default=["autocast", "float32"],
        metavar="REFERENCE",
        help="autocast (bits), float32, float64; default: autocast float32",
    )
    parser.add_argument("--backward", action="store_true", help="compare gradients, too")
    parser.add_argument("--loss-scale", type=float, metavar="SCALE", help="of the gradients; default: 1")
    parser.add_argument(
        "--max-ulp", type=int, metavar="N", help="the results may be N units in the last place apart"
    )
    parser.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="the least signal to noise of the results"
    )


def run(options: argparse.Namespace) -> int:
    """Compare; 0 if all is well, 1 if not."""
    made, policy = made_of(options), policy_of(options)
    found = compare_models(
        made.model,
        made.inputs,
        tuple(options.against),
        backward=options.backward,
        loss_scale=options.loss_scale,
        device_type=None if policy else options.device_type,
        dtype=DTYPES.get(options.dtype) if policy is None else None,
        policy=policy,
    )
    if options.json:
        write_json(found.to_json(), options.json)
    if options.json != "-":
        console = Console(highlight=False)
        console.print(
            found if console.is_terminal else str(found), markup=False, soft_wrap=not console.is_terminal
        )
    failures = _failures(found, options)
    for failure in failures:
        print(f"fxamp compare: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _failures(found: Comparison, options: argparse.Namespace) -> list[str]:
    failures = []
    if found.bits.equal is False:
        failures.append("the bits are not those of eager autocast")
    if found.first_nonfinite is not None:
        failures.append(str(found.first_nonfinite))
    if options.max_ulp is not None and found.max_ulp > options.max_ulp:
        largest = f"up to {found.max_ulp:g}" if math.isfinite(found.max_ulp) else "more than 256"
        failures.append(f"results are {largest} ulp apart, allowed are {options.max_ulp}")
    if options.min_sqnr is not None and found.min_sqnr < options.min_sqnr:
        failures.append(
            f"the SQNR of the results is {found.min_sqnr:.1f} dB, asked for are {options.min_sqnr:g}"
        )
    return failures
