"""Which weights of a model may be kept in low precision alone: those that no call needs in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxamp.ir.blocks import is_source
from fxamp.ir.modules import is_opaque
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.runtime.failures import Failure
from fxamp.runtime.program import Program
from fxamp.runtime.recapture import ALL_FAMILIES
from fxamp.runtime.runner import Runner

__all__ = ["Uses", "uses_in"]

_GRAD, _TRAINING = 3, 6  # in a signature, and in its family


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
    tree = [runner for top in runners for runner in top.tree()]
    for runner in tree:
        for program in _inference_programs(runner):
            uses.programs += _add_program(uses, program)
    _add_eager_code(uses, tree)
    return uses


def _add_eager_code(uses: Uses, tree: Iterable[Runner]) -> None:
    """Add what the Python of those modules uses that run eagerly in a frozen module, too.

    Not all do that run eagerly in a converted one.  A module that is kept from its program, since others use
    the weights that it casts, runs it where these casts are folded; they are but for those of weights that
    eager code uses.
    """
    failures = {runner: _failures_of_inference(runner) for runner in tree}
    shared = [runner for runner, found in failures.items() if found]
    eager = [runner for runner in shared if not all(failure.shared for failure in failures[runner])]
    while eager:
        for runner in eager:
            uses.eager |= _used_by_python(runner, failures[runner])
        shared = [runner for runner in shared if runner not in eager]
        eager = [runner for runner in shared if _casts(runner) & uses.eager]
    for runner in shared:
        if not _has_programs(runner):  # which of them it only rounds is not known
            uses.whole |= _used_by_python(runner, failures[runner])


def _used_by_python(runner: Runner, failures: Iterable[Failure]) -> set[int]:
    """The weights, by ``id``, that the Python of the module of *runner* uses."""
    used = runner.used_by({runner.path})
    if isinstance(runner.function, nn.Module):
        whole = any(failure.whole for failure in failures) or is_opaque(runner.function)
        used |= {id(weight) for weight in runner.function.parameters(recurse=whole)}
    return used


def _casts(runner: Runner) -> set[int]:
    """The weights, by ``id``, that the programs of *runner* cast, or may cast if there is none."""
    if _has_programs(runner):
        return {weight for program in _inference_programs(runner) for weight in program.kept}
    assert isinstance(runner.function, nn.Module), "eager code is outside of it, so it is part of a model"
    return set(map(id, runner.function.parameters()))


def _failures_of_inference(runner: Runner) -> list[Failure]:
    """Why calls run eagerly that are not made in training mode."""
    return [
        failure
        for key, failure in list(runner.failures.items())
        if key is None or key == ALL_FAMILIES or not any(key[_TRAINING])
    ]


def _has_programs(runner: Runner) -> bool:
    """Whether each kind of inference that is kept from its program has one."""
    shared = [key for key, failure in list(runner.failures.items()) if failure.shared]
    return all(key in runner.programs for key in shared if _is_of_inference(key))


def _inference_programs(runner: Runner) -> Iterator[Program]:
    for key, programs in list(runner.programs.items()):
        if _is_of_inference(key):
            for program in programs:
                yield from program.tree()


def _is_of_inference(key: Any) -> bool:
    return not key[_GRAD] and not any(key[_TRAINING])


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
