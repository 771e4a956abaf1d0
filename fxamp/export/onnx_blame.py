"""Which operator of a model makes it part from torch: all its values against those of the exported program.

onnxruntime's CPU provider runs most operators of float16 in float32, and leaves out the casts to float16 and
back between two of them.  So the model is run once more with all of its casts: if it is near then, they are
the cause.

Else the operator is looked for.  torch's exporter names a value as the node that it comes from.  So the
values of both sides that have a name in common are compared, in order, and the operator is named at whose
result the signal to noise ratio falls below what is enough, while all that it reads is above; if it falls
little by little, the one with the steepest step.  The operator is then run alone, on the values that torch's
reads: what it loses there is its own, the rest has come in before.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from fxamp.errors import ExportError
from fxamp.export.onnx_check import ENOUGH, Distance, as_arrays, measure, run_in_fresh_process
from fxamp.export.onnx_write import save_copy
from fxamp.ir.repeatable import has_no_values

__all__ = ["blame"]

_LARGEST = 2**28
"""Elements of all values together that are compared; the largest values are left out."""


def blame(
    path: Path,
    program: ExportedProgram,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    results: Sequence[torch.Tensor],
    low: torch.dtype,
) -> str:
    """The operator that causes most of the noise, in words; why not, if none is found.

    Args:
        path: The model.
        program: What it was translated from, operator by operator.
        inputs: The arrays of the call, by name.
        results: What the converted model gives for them.
        low: The low precision dtype.
    """
    with suppress(ExportError):
        rounded = _rounded(path, inputs, results, low)
        if not rounded.bad and rounded.sqnr_db >= ENOUGH:
            return (
                "noise comes in at casts to float16 and back that onnxruntime leaves out: "
                f"{_decibels(rounded.sqnr_db)} with all of them"
            )
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
            ratios[name] = _ratio(got[name], wanted[name], low)
    found = _worst(program, ratios)
    return f"{_told(found, program)}{_alone(path, found.name, wanted, low)}" if found else ""


def _rounded(
    path: Path,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    results: Sequence[torch.Tensor],
    low: torch.dtype,
) -> Distance:
    outputs = run_in_fresh_process(path, inputs, rounds_all=True).outputs
    return measure([outputs[str(value.name)] for value in ir.load(path).graph.outputs], results, low)


def _ratio(got: torch.Tensor, wanted: torch.Tensor, low: torch.dtype) -> float:
    distance = measure([got], [wanted], low)
    return -math.inf if distance.bad else distance.sqnr_db


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
        if has_no_values(n.target) or n.op != "call_function":
            return result
        if isinstance(result, torch.Tensor) and result.is_floating_point():
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
    return _run(model, inputs, path)


def _run(
    model: ir.Model, inputs: Mapping[str, np.ndarray[Any, Any]], beside: Path
) -> dict[str, torch.Tensor]:
    """What *model* gives, with all of its casts."""
    with tempfile.TemporaryDirectory(dir=beside.parent, prefix=".fxamp-check-") as folder:
        file = Path(folder, "part.onnx")
        save_copy(model, file)
        return dict(run_in_fresh_process(file, inputs, rounds_all=True).outputs)


# --- the operator -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fall:
    """Where the signal to noise ratio falls.

    Attributes:
        name: Of the value.
        ratio: Its decibels.
        before: The fewest of what the operator reads; ``nan`` if it falls little by little.
    """

    name: str
    ratio: float
    before: float


def _worst(program: ExportedProgram, ratios: Mapping[str, float]) -> _Fall | None:
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
            return _Fall(name, ratio, before)
        steps.append((min(before, 200.0) - min(ratio, 200.0), name))
    if not steps:
        return None
    _, name = max(steps)
    return _Fall(name, ratios[name], math.nan)


def _told(fall: _Fall, program: ExportedProgram) -> str:
    targets = {node.name: node.target for node in program.graph.nodes}
    operator = targets.get(fall.name, fall.name)
    if fall.ratio == -math.inf:
        return f"values stop being finite at {operator} ({fall.name})"
    came = f" from {fall.before:.1f} dB" if math.isfinite(fall.before) else ""
    return f"noise comes in at {operator} ({fall.name}), whose result falls to {fall.ratio:.1f} dB{came}"


def _alone(path: Path, name: str, wanted: Mapping[str, torch.Tensor], low: torch.dtype) -> str:
    """What the operator that gives *name* loses of itself; nothing, if that cannot be told."""
    model = ir.load(path)
    try:
        inputs = _read_by(model, name, wanted)
        got = _run(model, as_arrays(list(inputs.values()), list(inputs)), path)
    except (ExportError, ValueError):
        return ""
    ratio = _ratio(got[name], wanted[name], low)
    return f"; alone, from torch's values, it gives {_decibels(ratio)}"


def _read_by(model: ir.Model, name: str, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut *model* down to what makes the value *name* of *known* ones; those that it then reads.

    Raises:
        ValueError: It reads something that is not known.
    """
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    read: dict[str, torch.Tensor] = {}
    ahead = [values[name]]
    while ahead:
        node = ahead.pop().producer()
        for value in node.inputs if node is not None else ():
            if value is None or value.is_initializer() or value.name in read:
                continue
            if value.name in known:
                read[str(value.name)] = known[str(value.name)]
            else:
                ahead.append(value)
    model.graph = ir.convenience.extract(model.graph, list(read), [name])
    return read


def _decibels(ratio: float) -> str:
    return "the same values" if ratio == math.inf else f"{ratio:.1f} dB"
