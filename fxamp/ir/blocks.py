"""Blocks: parts of a call that have a graph of their own, because they are run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

__all__ = ["Checkpointed", "is_block", "is_source"]


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


def is_block(node: Node) -> bool:
    """Whether *node* is the graph of a block, not a tensor."""
    return "block" in node.meta


def is_source(node: Node) -> bool:
    """Whether *node* is a tensor that the graph reads: a parameter, a buffer, a constant."""
    return node.op == "get_attr" and not is_block(node)
