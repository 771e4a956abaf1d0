"""The contract of an artifact: the dtypes that it takes and gives, and what that costs.

=========  =======================================  ==============================================
choice     inputs                                   outputs
=========  =======================================  ==============================================
keep       as in the example                        as the model gives them without autocast
autocast                                            as the model gives them under autocast
low        float32 becomes the low precision dtype  likewise
=========  =======================================  ==============================================

The casts of a contract are nodes of the graph like all others; those that cancel another cast go with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.fx import Graph, Node

from fxamp.errors import ArgumentError
from fxamp.ir.facts import Fact
from fxamp.ir.operators import TO_DTYPE
from fxamp.passes.clean_up import Level
from fxamp.passes.fold_cast_chains import FoldCastChains
from fxamp.passes.fold_noop_casts import FoldNoopCasts
from fxamp.passes.remove_dead_code import RemoveDeadCode

__all__ = ["Contract", "InputDtypes", "OutputDtypes", "Port"]

InputDtypes = Literal["keep", "low"]
OutputDtypes = Literal["autocast", "keep", "low"]


@dataclass(frozen=True)
class Port:
    """One tensor that goes in or comes out.

    Attributes:
        name: Its name in the graph.
        dtype: What the artifact takes or gives: ``"bfloat16"``.
        model: What the model takes or gives under autocast.
    """

    name: str
    dtype: str
    model: str

    @property
    def cost(self) -> str:
        """What the difference costs; ``""`` if there is none."""
        if self.dtype == self.model:
            return ""
        if getattr(torch, self.dtype).itemsize < getattr(torch, self.model).itemsize:
            return f"rounded from {self.model}"
        return f"cast from {self.model}, nothing is lost"


@dataclass(frozen=True)
class Contract:
    """Which dtypes the caller has chosen.

    Raises:
        ArgumentError: There is no such choice.
    """

    inputs: InputDtypes = "keep"
    outputs: OutputDtypes = "autocast"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("inputs", self.inputs, get_args(InputDtypes)),
            ("outputs", self.outputs, get_args(OutputDtypes)),
        ):
            if value not in choices:
                raise ArgumentError(f"{name}={value!r}: it is one of {', '.join(map(repr, choices))}")

    def input_dtype(self, dtype: torch.dtype, low: torch.dtype) -> torch.dtype:
        """What the artifact takes where the model takes *dtype*."""
        return low if self.inputs == "low" and dtype is torch.float32 else dtype

    def output_dtype(self, dtype: torch.dtype, low: torch.dtype, *, plain: bool) -> torch.dtype:
        """What the artifact gives where the model gives *dtype* under autocast.

        Args:
            dtype: What autocast gives.
            low: The low precision dtype.
            plain: Whether the model itself knows nothing of *low*: no weight, buffer or input has it.
        """
        if self.outputs == "keep" and dtype is low and plain:
            return torch.float32
        return low if self.outputs == "low" and dtype is torch.float32 else dtype

    def write(self, graph: Graph, low: torch.dtype, *, plain: bool) -> tuple[list[Port], list[Port]]:
        """Write the casts into *graph*; the ports that it then has.

        Args:
            graph: The graph of a frozen program.
            low: The low precision dtype.
            plain: See :meth:`output_dtype`.
        """
        inputs = [self._write_input(graph, node, low) for node in graph.find_nodes(op="placeholder")]
        output = graph.output_node()
        values: Any = output.args[0]
        pairs = [
            self._write_output(graph, value, index, low, plain=plain) for index, value in enumerate(values)
        ]
        output.args = (tuple(result for result, _ in pairs),)
        FoldNoopCasts().run(graph)
        FoldCastChains(Level.INFERENCE_EXACT).run(graph)
        RemoveDeadCode().run(graph)
        return inputs, [port for _, port in pairs if port is not None]

    def _write_input(self, graph: Graph, node: Node, low: torch.dtype) -> Port:
        fact = node.meta["fact"]
        dtype = self.input_dtype(fact.dtype, low)
        if dtype is not fact.dtype:
            with graph.inserting_before(_first_call(graph)):
                cast = graph.call_function(TO_DTYPE, (node, fact.dtype))
            node.replace_all_uses_with(cast, lambda user: user is not cast)
            cast.meta.update(fact=fact, inserted=True)
            node.meta["fact"] = fact.cast_to(dtype, grad=False)
        return Port(node.name, _name(dtype), _name(fact.dtype))

    def _write_output(
        self, graph: Graph, value: Any, index: int, low: torch.dtype, *, plain: bool
    ) -> tuple[Any, Port | None]:
        fact = value.meta.get("fact") if isinstance(value, Node) else None
        if not isinstance(fact, Fact):
            return value, None
        dtype = self.output_dtype(fact.dtype, low, plain=plain)
        result = value
        if dtype is not fact.dtype:
            with graph.inserting_before(graph.output_node()):
                result = graph.call_function(TO_DTYPE, (value, dtype))
            result.meta.update(fact=fact.cast_to(dtype, grad=False), inserted=True)
        return result, Port(f"output_{index}", _name(dtype), _name(fact.dtype))


def _first_call(graph: Graph) -> Node:
    calls: Iterator[Node] = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    return next(calls)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
