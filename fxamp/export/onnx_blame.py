"""Which operator of a model makes it part from torch: all its values against those of the exported program.

torch's exporter names a value as the node that it comes from.  So the values of both sides that have a name
in common are compared, in order, and the operator is named at whose result the signal to noise ratio falls
below what is enough, while all that it reads is above; if it falls little by little, the one with the
steepest step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from fxamp.errors import ExportError
from fxamp.export.onnx_check import ENOUGH, measure, run_in_fresh_process
from fxamp.export.onnx_write import save_copy

__all__ = ["blame"]

_LARGEST = 2**28
"""Elements of all values together that are compared; the largest values are left out."""


def blame(
    path: Path,
    program: ExportedProgram,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    low: torch.dtype,
    *,
    widened: bool,
) -> str:
    """The operator that causes most of the noise, in words; why not, if none is found.

    Args:
        path: The model.
        program: What it was translated from, operator by operator.
        inputs: The arrays of the call, by name.
        low: The low precision dtype.
        widened: Whether its bfloat16 values come as float32.
    """
    wanted = _values_of(program, inputs)
    names = _common(path, wanted)
    if not names:
        return "the operator that causes it was not found: no value has the name of a node"
    try:
        got = _run_with_outputs(path, inputs, names)
    except ExportError:
        return "the operator that causes it was not found: onnxruntime refuses its values as outputs"
    ratios: dict[str, float] = {}
    for name in names:
        if got[name].shape == wanted[name].shape:
            distance = measure([got[name]], [wanted[name]], low)
            ratios[name] = -math.inf if distance.bad else distance.sqnr_db
    return _worst(program, ratios)


def _values_of(
    program: ExportedProgram, inputs: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, torch.Tensor]:
    """The floating results of all nodes, from the values that onnxruntime is given."""
    recorder = _Recorder(program.module(check_guards=False))
    arrays = iter(inputs.values())
    given = [
        _as_input(next(arrays), node) if isinstance(node.meta.get("val"), torch.Tensor) else None
        for node in recorder.graph.find_nodes(op="placeholder")
    ]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        recorder.run(*given)
    return recorder.values


def _as_input(array: np.ndarray[Any, Any], node: Node) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(node.meta["val"].dtype)


class _Recorder(Interpreter):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.values[n.name] = result.clone()
        return result


def _common(path: Path, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """The values that both have, in order; the small ones, if all are too large together."""
    graph = ir.load(path).graph
    there = [str(value.name) for node in graph for value in node.outputs if value.name in wanted]
    sizes = sorted(wanted[name].numel() for name in there)
    kept = sum(total <= _LARGEST for total in accumulate(sizes))
    return [name for name in there if kept == len(sizes) or wanted[name].numel() < sizes[kept]]


def _run_with_outputs(
    path: Path, inputs: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    model = ir.load(path)
    values = {value.name: value for node in model.graph for value in node.outputs}
    there = {value.name for value in model.graph.outputs}
    model.graph.outputs.extend(values[name] for name in names if name not in there)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fxamp-check-") as folder:
        file = Path(folder, "all.onnx")
        save_copy(model, file)
        return dict(run_in_fresh_process(file, inputs).outputs)


def _worst(program: ExportedProgram, ratios: Mapping[str, float]) -> str:
    nodes = {node.name: node for node in program.graph.nodes}
    steps: list[tuple[float, str]] = []
    for name, ratio in ratios.items():
        node = nodes.get(name)
        before = (
            min((ratios.get(read.name, math.inf) for read in node.all_input_nodes), default=math.inf)
            if node
            else math.inf
        )
        if ratio < ENOUGH <= before:
            return _told(node, name, ratio, before)
        steps.append((min(before, 200.0) - min(ratio, 200.0), name))
    if not steps:
        return ""
    _, name = max(steps)
    return _told(nodes.get(name), name, ratios[name], math.nan)


def _told(node: Node | None, name: str, ratio: float, before: float) -> str:
    operator = str(node.target) if node is not None else name
    if ratio == -math.inf:
        return f"values stop being finite at {operator} ({name})"
    came = f" from {before:.1f} dB" if math.isfinite(before) else ""
    return f"noise comes in at {operator} ({name}), whose result falls to {ratio:.1f} dB{came}"
