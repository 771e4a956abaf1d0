"""Take back what a call has done to a model, where it has to begin again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.operators import written_values
from fxamp.ir.regions import run_in_region

__all__ = ["Undo", "written"]

_Value = tuple[torch.Tensor, "int | None", torch.Tensor]


class Undo:
    """The states of torch's random generators, and the values of the tensors that are saved."""

    def __init__(self) -> None:
        self._saved: dict[int, _Value] = {}
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the values of *tensors*, those that are about to be written to, perhaps."""
        for tensor in tensors:
            if id(tensor) not in self._saved:
                version = None if tensor.is_inference() else tensor._version
                self._saved[id(tensor)] = (tensor, version, tensor.detach().clone())

    def restore(self) -> None:
        """Put everything back as it was."""
        for tensor, version, value in reversed(self._saved.values()):
            # batch_norm writes to its statistics without raising their version
            if (version is not None and tensor._version != version) or not torch.equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def written(graph: Graph) -> list[Node]:
    """The inputs and sources of a recorded *graph* that it may write to, perhaps through a view."""
    storages = {storage for node in graph.nodes for value in _targets(node) for storage in _storage(value)}
    origins = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return [node for node in origins if not storages.isdisjoint(_storage(node))]


def _targets(node: Node) -> list[Any]:
    """What a call may write to."""
    called: Any = node.target
    args = node.args
    if called is run_in_region:
        called, args = args[1], args[2:]
    if node.op != "call_function" or not callable(called):
        return []
    if not isinstance(called, OpOverload):
        return list(node.all_input_nodes) if getattr(called, "__module__", "").startswith("fxamp") else []
    return written_values(called, args, node.kwargs)


def _storage(node: Any) -> list[int]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return []
    return [value.untyped_storage()._cdata]
