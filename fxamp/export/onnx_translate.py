"""From an exported program to an ONNX model, by torch's exporter: the operators, the names, the opset.

The exporter's own optimizer is left out: it folds a float32 normalisation into a convolution of low precision
and leaves a graph that no runtime loads.  :mod:`fxamp.export.onnx_legalize` and
:mod:`fxamp.export.onnx_tidy` come in its place.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript.function_libs.torch_lib.ops import core
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from fxamp.errors import ExportError
from fxamp.export.onnx_attention import scaled_dot_product_attention
from fxamp.export.onnx_grouped import grouped_mm, grouped_operators
from fxamp.export.onnx_rounded import (
    glu,
    linear,
    log_sigmoid,
    pow_by_number,
    rsqrt,
    silu,
    with_number,
)
from fxamp.export.onnx_split import split, split_with_sizes
from fxamp.export.onnx_squeeze import squeeze_dim, squeeze_dims

__all__ = ["Translation", "output_names", "translate"]

aten = torch.ops.aten

_OPSETS = MappingProxyType({
    torch.float16: 20,   # all of torchlib's operators take float16 in it, and runtimes since 2024 read it
    torch.bfloat16: 22,  # the first in which convolutions and pools take bfloat16
})  # fmt: skip

_OURS: Mapping[Any, Callable[..., Any]] = MappingProxyType({
    aten.div.Tensor: with_number("Div", core.aten_div),
    aten.glu.default: glu,
    aten.linear.default: linear,
    aten.log_sigmoid.default: log_sigmoid,
    aten.mul.Tensor: with_number("Mul", core.aten_mul),
    aten.pow.Tensor_Scalar: pow_by_number,
    aten.rsqrt.default: rsqrt,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.silu.default: silu,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
    aten.squeeze.dim: squeeze_dim,
    aten.squeeze.dims: squeeze_dims,
})  # fmt: skip
"""Operators whose translation by torch's exporter does not do what torch does, rounds otherwise, or casts."""


@dataclass(frozen=True)
class Translation:
    """A model and where it comes from.

    Attributes:
        model: The model.
        program: The program in the operators that the exporter translates one by one; the model's values have
            the names of its nodes.
    """

    model: ir.Model
    program: ExportedProgram


def translate(
    program: ExportedProgram, low: torch.dtype, axes: Sequence[Sequence[str | None]] = ()
) -> Translation:
    """*program* as an ONNX model whose inputs and outputs have readable names.

    Args:
        program: What ``torch.export`` gave; its weights are shared with the model, not copied.
        low: The low precision dtype.
        axes: For each input names of its sizes, which take the place of torch's ``s0``.

    Raises:
        ExportError: torch's exporter has no translation for an operator, or fails.
    """
    with _quiet():
        try:
            exported: Any = torch.onnx.export(
                program, (), dynamo=True, optimize=False, verbose=False, opset_version=_OPSETS[low],
                custom_translation_table={**_OURS, **dict.fromkeys(grouped_operators(), grouped_mm)},
            )  # fmt: skip
        except Exception as error:
            raise ExportError(f"torch.onnx.export refuses the program: {_told(error, program)}") from error
    model: ir.Model = exported.model
    common.InlinePass()(model)
    _name_outputs(model, output_names(program))
    _name_axes(model, axes)
    return Translation(model, exported.exported_program)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and onnxscript warn of themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- errors -------------------------------------------------------------------------------------------


_OVERLOAD = r"OpOverload\(op='([\w.]+)', overload='(\w+)'\)"


def _told(error: Exception, program: ExportedProgram) -> str:
    """The innermost cause, the operator that it names and the user's line with it."""
    causes = [str(cause).strip() for cause in _chain(error)]
    text = next((cause for cause in reversed(causes) if cause), type(error).__name__).splitlines()[0]
    node = _node_of(causes, program)
    if node is None:
        return f"{text}\n  format='pt2' takes what torch.export takes"
    where = _last_line(node.meta.get("stack_trace"))
    return (
        f"{text}\n  at {node.target}{f' ({where})' if where else ''}\n"
        "  write it with operators that ONNX has, or use format='pt2'"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _node_of(texts: Sequence[str], program: ExportedProgram) -> torch.fx.Node | None:
    named = {match for text in texts for match in re.findall(r"%(\w+) ", text)}
    targets = {match for text in texts for match in re.findall(r"\w+[.:]+\w+\.\w+", text)}
    targets |= {".".join(match) for text in texts for match in re.findall(_OVERLOAD, text)}
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    found = [node for node in nodes if str(node.target) in targets]
    return next(iter(found or [node for node in nodes if node.name in named]), None)


def _last_line(trace: str | None) -> str:
    """``file.py:12 in forward: source`` of the last frame that is the user's."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\w+)\n\s+(.+)', trace or "")
    if not frames:
        return ""
    file, line, function, source = frames[-1]
    return f"{file.rpartition('/')[2]}:{line} in {function}: {source}"


# --- names --------------------------------------------------------------------------------------------


def output_names(program: ExportedProgram) -> list[str]:
    """A name for each tensor that comes out: its key or field in the result, else ``output_0``."""
    kept = [
        isinstance(spec.arg, TensorArgument)
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    names: list[str] = []
    for index, path in enumerate(_paths(program, len(kept))):
        if kept[index]:
            name = "_".join(path) if path and not path[0].isdigit() else f"output_{'_'.join(path) or index}"
            names.append(name if name not in names else f"{name}_{index}")
    return names


def _paths(program: ExportedProgram, count: int) -> list[list[str]]:
    spec = program.call_spec.out_spec
    try:
        assert spec is not None
        tree = pytree.tree_unflatten(list(range(count)), spec)
        leaves, _ = pytree.tree_flatten_with_path(tree)
    except Exception:  # noqa: BLE001  a class that cannot be made of numbers
        return [[] for _ in range(count)]
    return [[_key(key) for key in path] for path, _ in leaves]


def _name_axes(model: ir.Model, axes: Sequence[Sequence[str | None]]) -> None:
    names: dict[str, str] = {}
    if len(axes) == len(model.graph.inputs):
        for value, of_input in zip(model.graph.inputs, axes, strict=True):
            symbols = [str(getattr(size, "value", size)) for size in value.shape or ()]
            pairs = zip(symbols, of_input, strict=False)
            names.update({symbol: name for symbol, name in pairs if name and not symbol.isdigit()})
    for value in (
        *model.graph.inputs,
        *(result for node in model.graph.all_nodes() for result in node.outputs),
    ):
        if value.shape is not None:
            value.shape = ir.Shape([_named_size(size, names) for size in value.shape])


def _named_size(size: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | ir.SymbolicDim:
    """*size* with names for symbols: ``2*batch`` for ``2*s0``."""
    if isinstance(size, int) or not isinstance(size.value, str):
        return size
    return ir.SymbolicDim(re.sub(r"\w+", lambda symbol: names.get(symbol[0], symbol[0]), size.value))


def _key(key: Any) -> str:
    name = next((getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)), key)
    return re.sub(r"\W+", "_", str(name))


def _name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Rename what comes out; a value inside that has such a name already makes way."""
    common.OutputFixPass()(model)
    outputs = model.graph.outputs
    wanted = dict(zip(outputs, names, strict=False))
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in names and value not in wanted:
                value.name = f"{value.name}_inside"
    for index, value in enumerate(outputs):  # two of them may swap names
        value.name = f"{value.name}_{index}_out"
    for value, name in wanted.items():
        value.name = name
