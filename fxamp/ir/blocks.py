"""Parts of a call that are one node, since the backward pass has its own idea of them.

What runs under a checkpoint is a block with a graph of its own, which is run again in the backward pass; a
custom ``autograd.Function`` brings its own backward and is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from fxamp.ir.regions import RealRegion, Region, no_autocast

__all__ = ["Checkpointed", "CustomFunction", "is_block", "is_opaque_call", "is_source"]


@dataclass(frozen=True)
class Checkpointed:
    """The operator that runs a block under ``torch.utils.checkpoint``, as the model did.

    Attributes:
        first: For each input of the block in the forward pass, its place among the operands, or behind them
            in the closure.
        again: Likewise in the backward pass; the reentrant kind runs another block there.
        options: The keyword arguments of the checkpoint.
    """

    first: tuple[int, ...]
    again: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    __name__ = "checkpointed"

    def __call__(
        self,
        first: Callable[..., Any],
        again: Callable[..., Any],
        operands: Sequence[torch.Tensor],
        closure: Sequence[Any],
    ) -> Any:
        """The outputs of the block.

        Args:
            first: The block as it runs in the forward pass.
            again: The block as it runs in the backward pass.
            operands: The tensors that the model passed to the checkpoint.
            closure: The other values that the block uses.
        """
        calls = 0

        def run(*now: Any) -> Any:
            nonlocal calls
            calls += 1
            block, inputs = (first, self.first) if calls == 1 else (again, self.again)
            values = (*now, *closure)
            return block(*[values[place] for place in inputs])

        return checkpoint(run, *operands, **dict(self.options))


@dataclass(frozen=True)
class CustomFunction:
    """The operator that applies a custom ``autograd.Function``.

    Attributes:
        function: Its class.
        region: The state of autocast that it sees.
    """

    function: Any
    region: RealRegion

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the function."""
        region = self.region
        is_off = isinstance(region, Region) and not region.enabled
        with no_autocast() if is_off else region.context():
            return self.function.apply(*args, **kwargs)


def is_opaque_call(node: Node) -> bool:
    """Whether *node* calls Python: its results are known from the recording alone."""
    return isinstance(node.target, (Checkpointed, CustomFunction))


def is_block(node: Node) -> bool:
    """Whether *node* is the graph of a block, not a tensor."""
    return "block" in node.meta


def is_source(node: Node) -> bool:
    """Whether *node* is a tensor that the graph reads: a parameter, a buffer, a constant."""
    return node.op == "get_attr" and not is_block(node)
