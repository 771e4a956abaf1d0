"""Write a model for deployment: the graph with every cast, each weight in the dtype that it is used in.

The format goes by the ending of the file (.pt2, .onnx) or by --format.  What was written is loaded again and
compared with the converted model, and the file is there only if it holds what it should.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn
from torch.export import Dim

from fxamp.cli.factories import UsageError
from fxamp.cli.options import DTYPES, add_model, made_of, policy_of, write_json
from fxamp.compare.inputs import Item, items_of
from fxamp.export import export
from fxamp.export.contract import InputDtypes, OutputDtypes
from fxamp.export.export import Format
from fxamp.export.fitted import Fit

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "write a half precision file that other runtimes load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxamp export``."""
    add_model(parser)
    parser.add_argument("file", metavar="FILE", help="what to write: model.pt2, model.onnx")
    parser.add_argument("--format", choices=get_args(Format), help="default: as the ending of FILE says")
    parser.add_argument(
        "--dynamic-batch", action="store_true", help="the first size of every tensor that goes in may differ"
    )
    parser.add_argument(
        "--dynamic", action="append", default=[], metavar="NAME:DIM", help="so may this one; may be repeated"
    )
    parser.add_argument("--input-dtypes", choices=get_args(InputDtypes), default="keep",
                        help="low: float32 goes in in low precision; default: %(default)s")  # fmt: skip
    parser.add_argument("--output-dtypes", choices=get_args(OutputDtypes), default="autocast",
                        help="keep: as without autocast; default: %(default)s")  # fmt: skip
    parser.add_argument("--fit", choices=get_args(Fit), default="warn",
                        help="what to do about constants that do not fit; default: %(default)s")  # fmt: skip
    parser.add_argument("--no-check", action="store_true", help="do not load the file again")


def run(options: argparse.Namespace) -> int:
    """Export, and tell what the file holds."""
    if options.train:
        raise UsageError("a model is exported in evaluation mode: leave --train out")
    made, policy = made_of(options), policy_of(options)
    if not isinstance(made.model, nn.Module):
        raise UsageError(f"{options.model} gives a function, and only an nn.Module can be exported")
    item = next(items_of(made.inputs, made.model))
    if options.dynamic_batch:
        item = Item(*_widened((item.args, dict(item.kwargs))))
    artifact = export(
        made.model,
        item.args,
        item.kwargs,
        options.file,
        format=options.format,
        device_type=None if policy else options.device_type,
        dtype=DTYPES.get(options.dtype) if policy is None else None,
        policy=policy,
        dynamic_shapes=_dynamic_shapes(made.model, item, options),
        inputs=options.input_dtypes,
        outputs=options.output_dtypes,
        fit=options.fit,
        check=not options.no_check,
    )
    if options.json:
        write_json(artifact.to_json(), options.json)
    if options.json != "-":
        print(f"{options.file}: {artifact}")
    return 0


def _widened(call: Any) -> Any:
    """The call with a batch of two where it is one: torch takes a size of one for a fixed one."""

    def twice(value: Any) -> Any:
        is_one = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == 1
        return torch.cat([value, value]) if is_one else value

    return torch.utils._pytree.tree_map(twice, call)


def _dynamic_shapes(model: nn.Module, item: Item, options: argparse.Namespace) -> dict[str, Any] | None:
    if not options.dynamic_batch and not options.dynamic:
        return None
    arguments = inspect.signature(model.forward).bind(*item.args, **item.kwargs).arguments
    shapes = {name: _batch(value) if options.dynamic_batch else None for name, value in arguments.items()}
    for text in options.dynamic:
        name, _, dim = text.rpartition(":")
        if not isinstance(arguments.get(name), torch.Tensor) or not dim.lstrip("-").isdigit():
            tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
            raise UsageError(
                f"--dynamic {text} names no size: it is NAME:DIM of a tensor, one of {', '.join(tensors)}"
            )
        shapes[name] = {**(shapes[name] or {}), int(dim): Dim.DYNAMIC}
    return shapes


def _batch(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {0: Dim.DYNAMIC} if value.dim() else None
    if isinstance(value, Mapping):
        return {key: _batch(item) for key, item in value.items()}
    return type(value)(map(_batch, value)) if type(value) in (list, tuple) else None
