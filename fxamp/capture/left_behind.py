"""A fake tensor that Python keeps beyond the call becomes the real tensor that it stands for.

A table in an ``lru_cache`` or in a dict of the class is made once, by the first call; if that call is a
recording, what is kept is a fake, and the user's model would compute with it from then on.  So when a
recording is over, every fake that somebody other than the recording refers to is looked up in the graph, its
value is computed for real, and the two tensors change places: all references see the real one.

Only what pure operators made is computed; a fake that takes part in the gradient is left.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from fxamp.ir.facts import example_size
from fxamp.ir.operators import is_impure
from fxamp.ir.regions import Region, enter_region, no_autocast

__all__ = ["replace_left_behind"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
Around = Callable[[Region], AbstractContextManager[object]]


def replace_left_behind(
    graph: Graph, region: Region, reals: Mapping[Node, torch.Tensor], around: Around
) -> int:
    """Replace the fakes among *graph*'s values that something else refers to; give their number.

    Args:
        graph: What was recorded; nothing but its nodes may hold the fakes on the recording's behalf.
        region: The state of autocast that it begins in.
        reals: The real tensors of inputs and sources.
        around: Makes the context in which real operators run as in a region.
    """
    nodes = [node for node in graph.nodes if isinstance(node.meta.get("val"), FakeTensor)]
    held = _referred_to(_held(nodes))
    if not held:
        return 0
    values = _Values(graph, region, reals, around)
    found = [(node, real) for node in held if (real := values.stand_in_for(node)) is not None]
    for node, real in found:  # all of them are computed: from now on the two have changed places
        fake, plain = node.meta["val"], node.meta["val"].detach()
        for same in graph.nodes:  # an operator may give back the very tensor that it was given
            if same.meta.get("val") is fake:
                same.meta["val"] = plain
        _swap(fake, real)
    return len(found)


def _held(nodes: Sequence[Node]) -> list[Node]:
    """The *nodes* whose fakes are referred to by more than the graph."""
    own: dict[int, int] = {}

    def count(value: Any) -> Any:
        own[id(value)] = own.get(id(value), 0) + 1
        return value

    for graph in {node.graph for node in nodes}:
        for node in graph.nodes:
            map_aggregate(node.meta.get("val"), count)
    made = [n for n in nodes if n.op == "call_function" and not n.meta["val"].requires_grad]
    return [node for node in made if sys.getrefcount(node.meta["val"]) - 1 > own[id(node.meta["val"])]]


def _referred_to(nodes: Sequence[Node]) -> list[Node]:
    """Those of *nodes* whose fakes an object of Python's refers to; the base of a view is held otherwise."""
    fakes = {id(node.meta["val"]) for node in nodes}
    own = {id(node.meta) for node in nodes}
    found: set[int] = set()
    for holder in gc.get_referrers(*[node.meta["val"] for node in nodes]) if nodes else ():
        if id(holder) not in own and not _is_meta_list(holder, nodes):
            found |= fakes.intersection(map(id, gc.get_referents(holder)))
    return [node for node in nodes if id(node.meta["val"]) in found]


def _is_meta_list(holder: object, nodes: Sequence[Node]) -> bool:
    """Whether *holder* is the list of results that a node keeps."""
    values = (node.args[0].meta.get("val") for node in nodes if isinstance(node.args[0], Node))
    return isinstance(holder, (list, tuple)) and any(holder is value for value in values)


class _Values:
    """The real values of nodes, computed when they are asked for."""

    def __init__(
        self, graph: Graph, region: Region, reals: Mapping[Node, torch.Tensor], around: Around
    ) -> None:
        self._known: dict[Node, Any] = dict(reals)
        self._around = around
        self._regions: dict[Node, Region] = {}
        self._given = list(reals.values())
        for node in graph.nodes:
            if node.target is enter_region:
                region = node.args[0]
            self._regions[node] = region

    def stand_in_for(self, node: Node) -> torch.Tensor | None:
        """The real tensor for the fake of *node*; ``None`` if there is none like it."""
        fake = node.meta["val"]
        try:
            real: torch.Tensor = self.of(node)
            alike = real.shape == torch.Size(map(_size, fake.shape)) and real.device == fake.device
        except Exception:  # noqa: BLE001  it needs what is not there: the fake stays
            return None
        if not alike or real.dtype is not fake.dtype:
            return None
        return real.clone() if self._is_given(real) else real

    def _is_given(self, real: torch.Tensor) -> bool:
        """Whether *real* shares its memory with an input or a parameter, which must not change places."""
        address = real.untyped_storage().data_ptr()
        dense = [
            tensor for tensor in self._given if type(tensor) in _PLAIN and tensor.layout is torch.strided
        ]
        return any(tensor.untyped_storage().data_ptr() == address for tensor in dense)

    def of(self, node: Node) -> Any:
        """The value of *node*; raises if something impure, or anything unknown, has a part in it."""
        if node in self._known:
            return self._known[node]
        if "number" in node.meta:
            return _size(node.meta["number"])
        if node.op != "call_function" or self._is_written(node):
            raise LookupError(node.name)
        found: Any = map_arg((node.args, node.kwargs), self.of)
        args, kwargs = found
        if node.target is operator.getitem:
            self._known[node] = args[0][args[1]]
            return self._known[node]
        if not isinstance(node.target, OpOverload) or is_impure(node):
            raise LookupError(node.name)
        region = self._regions[node]
        with torch.no_grad(), self._around(region) if region.enabled else no_autocast():
            self._known[node] = node.target(*args, **kwargs)
        return self._known[node]

    def _is_written(self, node: Node) -> bool:
        """Whether an in-place operator changes the value later."""
        targets = [user.target for user in node.users]
        return any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets)


def _size(size: Any) -> int:
    found = example_size(size)
    if found is None:
        raise LookupError("a size that depends on data")
    return found


def _swap(fake: Any, real: Any) -> None:
    """Let all references to *fake* see *real*; ``torch.utils.swap_tensors`` would refuse weak ones."""
    fake.__class__, real.__class__ = real.__class__, fake.__class__
    fake.__dict__, real.__dict__ = real.__dict__, fake.__dict__
    torch._C._swap_tensor_impl(fake, real)
