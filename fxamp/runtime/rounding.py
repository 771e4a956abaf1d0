"""Which weights of a model may be kept in low precision alone: those that no call needs in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Graph, Node

from fxamp.ir.blocks import is_source
from fxamp.ir.modules import is_opaque
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.runtime.program import Program
from fxamp.runtime.runner import Runner

__all__ = ["Uses", "uses_in"]

_GRAD, _TRAINING = 3, 6  # in a signature


@dataclass
class Uses:
    """What calls do with the tensors of a model, by ``id``.

    Attributes:
        rounded: The dtypes that each is cast to.
        whole: Those that are used without a cast.
        eager: Those that eager code uses.
        programs: How many programs were looked at.
    """

    rounded: dict[int, set[torch.dtype]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    eager: set[int] = field(default_factory=set)
    programs: int = 0

    def low(self, weight: torch.Tensor) -> torch.dtype | None:
        """The dtype that *weight* can be kept in alone; ``None`` if float32 values are, or may be, needed."""
        dtypes = self.rounded.get(id(weight), set())
        if len(dtypes) != 1 or id(weight) in self.whole or id(weight) in self.eager:
            return None
        (dtype,) = dtypes
        return dtype if _is_plain(weight) and _strides_as(weight, dtype) == weight.stride() else None


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.layout is torch.strided


def _strides_as(weight: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """The strides that a cast of *weight* has."""
    meta = torch.empty_strided(weight.shape, weight.stride(), device="meta")
    return tuple(meta.to(dtype).stride())


def uses_in(runners: Iterable[Runner]) -> Uses:
    """What the inference programs of *runners* do, and the eager code that runs around them."""
    uses = Uses()
    for top in runners:
        eager = {runner.path for runner in top.tree() if runner.failures}
        for runner in top.tree():
            for program in _inference_programs(runner):
                uses.programs += _add_program(uses, program)
            if runner.failures and isinstance(runner.function, nn.Module):
                whole = any(failure.whole for failure in runner.failures.values()) or is_opaque(
                    runner.function
                )
                uses.eager |= {id(weight) for weight in runner.function.parameters(recurse=whole)}
        uses.eager |= top.used_by(eager)
    return uses


def _inference_programs(runner: Runner) -> Iterator[Program]:
    for key, programs in list(runner.programs.items()):
        if not key[_GRAD] and not any(key[_TRAINING]):
            for program in programs:
                yield from program.tree()


def _add_program(uses: Uses, program: Program) -> bool:
    tensors = program.tensors()
    if tensors is None:
        return False
    _add_graph(uses, program.module.graph, tensors)
    if program.operator is not None:
        uses.whole |= set(map(id, program.operator.tensors()))
    return True


def _add_graph(uses: Uses, graph: Graph, tensors: list[torch.Tensor]) -> None:
    """Fold a copy of *graph*, and see what is left."""
    folded = Graph()
    copies: dict[Node, Node] = {}
    folded.output(folded.graph_copy(graph, copies))
    weights = {
        str(node.target): tensor
        for node, tensor in zip(filter(is_source, graph.nodes), tensors, strict=True)
        if isinstance(tensor, nn.Parameter)
    }
    FoldWeightCasts({name: weight.is_contiguous() for name, weight in weights.items()}).run(folded)
    for node in filter(is_source, folded.nodes):
        if "rounded" in node.meta:
            target, dtype = node.meta["rounded"]
            uses.rounded.setdefault(id(weights[target]), set()).add(dtype)
        elif str(node.target) in weights:
            uses.whole.add(id(weights[str(node.target)]))
