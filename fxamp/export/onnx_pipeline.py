"""The steps from a deployed program to an ONNX file that was checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.traversal import RecursiveGraphIterator
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from fxamp.capture.dynamic_shapes import names_of_sizes
from fxamp.errors import ExportWarning
from fxamp.export.artifact import Artifact
from fxamp.export.atomic import atomically_with_data
from fxamp.export.contract import Port
from fxamp.export.deployed import Deployed
from fxamp.export.onnx_blame import blame
from fxamp.export.onnx_check import ENOUGH, as_arrays, check_model, measure, run_in_fresh_process
from fxamp.export.onnx_legalize import legalize
from fxamp.export.onnx_random import random_notes
from fxamp.export.onnx_tidy import tidy
from fxamp.export.onnx_translate import translate
from fxamp.export.onnx_write import LARGEST, add_metadata, weight_bytes, write_model
from fxamp.export.pt2 import exported

__all__ = ["run_pipeline"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


def run_pipeline(
    deployed: Deployed,
    artifact: Artifact,
    path: Path,
    dynamic_shapes: Any,
    *,
    check: bool,
    external_data: bool | None,
) -> Artifact:
    """See :func:`fxamp.export.onnx.write_onnx`."""
    program = exported(deployed, dynamic_shapes)
    translation = translate(program, deployed.low, _axes(deployed, dynamic_shapes))
    model = translation.model
    legalize(model)
    tidy(model)
    artifact = _described(artifact, model, program)
    if check:
        artifact = replace(artifact, notes=(*artifact.notes, *_kernel_notes(model)))
    size = weight_bytes(model)
    external = size > LARGEST if external_data is None else external_data
    with atomically_with_data(path, size=size) as pair:
        write_model(model, pair, external=external)
        check_model(pair.model)
        if check:
            artifact = replace(artifact, check=_checked(deployed, translation.program, pair.model))
        add_metadata(pair.model, artifact)
    return artifact


def _axes(deployed: Deployed, dynamic_shapes: Any) -> list[list[str | None]]:
    if dynamic_shapes is None:
        return []
    return names_of_sizes(dynamic_shapes, deployed.module, deployed.args, deployed.kwargs)


# --- what is told -------------------------------------------------------------------------------------


def _described(artifact: Artifact, model: ir.Model, program: ExportedProgram) -> Artifact:
    nodes = list(RecursiveGraphIterator(model.graph))
    casts = [node for node in nodes if _is_float_cast(node)]
    return replace(
        artifact,
        inputs=_named(artifact.inputs, model.graph.inputs),
        outputs=_named(artifact.outputs, model.graph.outputs),
        casts=len(casts),
        operators=len(nodes) - len(casts),
        weight_bytes=weight_bytes(model),
        notes=(*artifact.notes, *_state_notes(program), *random_notes(program)),
    )


def _named(ports: Sequence[Port], values: Sequence[ir.Value]) -> tuple[Port, ...]:
    if len(ports) != len(values):
        return tuple(ports)
    return tuple(replace(port, name=str(value.name)) for port, value in zip(ports, values, strict=True))


def _is_float_cast(node: ir.Node) -> bool:
    if node.op_type != "Cast" or node.inputs[0] is None:
        return False
    return node.inputs[0].dtype in _FLOATS and node.outputs[0].dtype in _FLOATS


def _state_notes(program: ExportedProgram) -> list[str]:
    written = [
        spec.target
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    ]
    if not written:
        return []
    names = ", ".join(map(repr, written))
    return [
        f"the model writes to {names}; an ONNX model has no state, and starts each call from what is stored"
    ]


def _kernel_notes(model: ir.Model) -> list[str]:
    from fxamp.export.onnx_kernels import lacking, tell_lacking  # noqa: PLC0415  onnxruntime is slow to load

    found = lacking(model)
    lines = tell_lacking(found)
    if "bfloat16" in found:
        message = (
            f"{next(line for line in lines if 'bfloat16' in line)}\n"
            "  dtype=torch.float16 gives a model that it runs"
        )
        warnings.warn(message, ExportWarning, stacklevel=6)  # the call of export
    return lines


# --- the check ----------------------------------------------------------------------------------------


def _checked(deployed: Deployed, program: ExportedProgram, path: Path) -> str:
    """What onnxruntime gives in a fresh process, against the converted model here."""
    graph = ir.load(path).graph
    leaves = pytree.tree_leaves((deployed.args, deployed.kwargs))
    inputs = as_arrays(leaves, [str(value.name) for value in graph.inputs])
    loaded = run_in_fresh_process(path, inputs)
    got = [loaded.outputs[str(value.name)] for value in graph.outputs]
    wanted = [leaf for leaf in deployed.reference() if isinstance(leaf, torch.Tensor)]
    distance = measure(got, wanted, deployed.low)
    parts = ["onnxruntime CPU"]
    if loaded.widened:
        parts[0] += ", which lacks bfloat16 kernels: their operators in float32, rounded likewise"
    parts.append(str(distance))
    if distance.bad or not distance.sqnr_db >= ENOUGH:
        parts.append(blame(path, program, inputs, wanted, deployed.low))
    parts += [f"warns: {line}" for line in loaded.warnings]
    return "; ".join(part for part in parts if part)
