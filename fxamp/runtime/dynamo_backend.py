"""``torch.compile(model, backend="fxamp")``: Dynamo's graphs, run as eager autocast would run them.

Torch finds the backend by name through the entry point ``torch_dynamo_backends`` of the installed package;
from a checkout that is not installed, ``backend=fxamp_backend`` gives it the function itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from fxamp.capture.capture import Captured
from fxamp.errors import ArgumentError
from fxamp.ir.regions import no_autocast
from fxamp.policy import Policy
from fxamp.runtime.dynamo_graph import (
    has_foreign_operators,
    has_regions,
    inputs_of,
    must_split,
    read_sizes_from_tensors,
    split,
)
from fxamp.runtime.graph_piece import GraphPiece
from fxamp.runtime.surroundings import Surroundings, is_inside_a_region

__all__ = ["fxamp_backend"]

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]

_LOG = logging.getLogger("fxamp")


@dataclass(frozen=True)
class _Options:
    dtype: torch.dtype | None = None
    policy: Policy | None = None
    inner: str | Callable[..., Any] = "eager"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> _Options:
        unknown = sorted(options.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            known = list(cls.__dataclass_fields__)
            raise ArgumentError(f"the backend fxamp has no option {unknown[0]!r}; its options are {known}")
        read = cls(**options)
        if read.policy is not None and read.dtype not in (None, read.policy.low):
            raise ArgumentError(f"dtype is {read.dtype}, the policy is one for {read.policy.low}")
        _refuse_places(read.policy)
        return read

    def policy_for(self, example_inputs: Sequence[Any]) -> Policy | None:
        if self.policy is not None or self.dtype is None:
            return self.policy
        devices = [value.device.type for value in example_inputs if isinstance(value, torch.Tensor)]
        accelerators = [device for device in devices if device != "cpu"]
        return Policy.native((accelerators or ["cpu"])[0], self.dtype)


def fxamp_backend(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs; what ``torch.compile(model, backend="fxamp")`` calls.

    Inside of ``torch.autocast`` the graph does what eager autocast does there, in the dtype of that region,
    for that is what the eager code around the graph does too; a region that is switched off counts as well.
    Outside of it, the option ``dtype`` or ``policy`` stands for a region around each graph; without them
    nothing is cast but what the model's own regions ask for.  The graph is captured at its first call.

    Args:
        module: The graph, with the parameters among its inputs.
        example_inputs: The inputs of the call that Dynamo traced.
        options: ``dtype`` (float16 or bfloat16), ``policy`` (an :class:`fxamp.Policy`), ``inner``: what runs
            the rewritten graph, ``"eager"`` (default) or another backend, by name or as a function.
        mode: Refused; modes belong to the inner backend.

    Raises:
        ArgumentError: There is no such option, or two do not fit.
    """
    if mode is not None:
        raise ArgumentError(f"the backend fxamp has no modes, so not {mode!r}")
    read = _Options.read(options or {})
    surroundings = Surroundings(read.policy_for(example_inputs))
    if read.inner == "eager":
        return _EagerGraph(module, surroundings)
    return _compile_with(lookup_backend(read.inner), module, example_inputs, surroundings)


def _refuse_places(policy: Policy | None) -> None:
    """Refuse overrides that select by what a graph of Dynamo's no longer tells."""
    for override in policy.overrides if policy is not None else ():
        selector = override.selector
        if selector.module or selector.where or selector.codes():
            raise ArgumentError(
                f"under torch.compile an override can select operators alone, not  {override}\n"
                "  convert the model with fxamp.convert(model, policy=...), and compile that if you like"
            )


class _EagerGraph:
    """One graph as flat code, or split into pieces where it has to be."""

    def __init__(self, module: GraphModule, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._has_regions = has_regions(module)
        self._must_split = must_split(module) or has_foreign_operators(module)
        self._module, self._inputs = read_sizes_from_tensors(module)
        self._whole = GraphPiece(self._module, self._inputs, surroundings)
        self._split: GraphModule | None = None

    def __call__(self, *args: Any) -> Any:
        """The outputs of the graph for the inputs that Dynamo passes."""
        args = tuple([args[index] for index in self._inputs.kept])
        region = self._surroundings.region(args)
        if not self._must_split and (region.enabled or not self._has_regions):
            return self._whole(*args)
        if self._split is None:
            self._split = split(self._module, self._piece)
        if region.enabled and not is_inside_a_region():
            with region.context():
                return self._split(*args)
        return self._split(*args)

    def _piece(self, run: GraphModule) -> GraphPiece:
        return GraphPiece(run, inputs_of(run), self._surroundings)


def _compile_with(
    inner: Compiler, module: GraphModule, example_inputs: Sequence[Any], surroundings: Surroundings
) -> Callable[..., Any]:
    """The graph, rewritten at its first call and handed to *inner*."""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    region = surroundings.region(tensors)
    if not region.enabled and surroundings.policy is None:
        return inner(module, list(example_inputs))
    if must_split(module):
        _LOG.warning("a graph with higher-order operators goes to the inner backend as it is, under autocast")
        with region.context():
            return inner(module, list(example_inputs))
    module, inputs = read_sizes_from_tensors(module)
    plain = torch.compile(module, backend=inner)
    piece = GraphPiece(module, inputs, surroundings, _Inner(inner), plain)
    return lambda *args: piece(*[args[index] for index in inputs.kept])


@dataclass(frozen=True)
class _Inner:
    compiler: Compiler

    def __call__(self, module: GraphModule, captured: Captured) -> Callable[..., Any]:
        """Call the backend in the surroundings that Dynamo would give it."""
        fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        module.recompile()
        with tracing(TracingContext(captured.fakes)), no_autocast():
            return self.compiler(module, fakes)
