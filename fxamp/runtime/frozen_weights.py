"""The weights of a frozen module: which copies there are of each, and what programs read instead of casting.

==========================================  ====================================  ===========================
what programs and eager code do with it     in the module tree                    beside it
==========================================  ====================================  ===========================
only casts, all to one dtype                :class:`RoundedWeight`, no float32    nothing
casts and other uses                        a float32 parameter                   one rounded copy a dtype
no casts, or its Python runs eagerly        a float32 parameter                   nothing
==========================================  ====================================  ===========================

What programs compute of weights, buffers and constants alone is beside them, too: computed once, in
``derived_weights.py``.  The weights and buffers themselves stay as the table says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxamp.capture.sources import Constant, Place, Source, places_of
from fxamp.errors import FrozenError
from fxamp.ir.blocks import is_source
from fxamp.ir.rounded_weight import RoundedWeight
from fxamp.ir.where import locate
from fxamp.passes.base import Pass
from fxamp.passes.fold_weight_arithmetic import FoldWeightArithmetic
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.passes.make_by_size import MakeBySize
from fxamp.passes.remove_dead_code import RemoveDeadCode
from fxamp.runtime.derived_weights import Derived, DerivedWeights, has_version
from fxamp.runtime.lower import FlatCode
from fxamp.runtime.packed_code import PackedCode
from fxamp.runtime.packed_weights import PackedWeights, Prepacked
from fxamp.runtime.prepack import Packing
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["FrozenTensors", "FrozenWeights"]


class FrozenWeights:
    """The rounded copies of one frozen module's weights, and the tensors that are derived of them.

    Args:
        unfolded: Weights, by ``id``, whose casts stay in the graphs, since eager code uses them too.
        packing: How they are packed; ``None`` for not at all.
    """

    def __init__(self, unfolded: frozenset[int] = frozenset(), packing: Packing | None = None) -> None:
        self._unfolded = unfolded
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._derived = DerivedWeights()
        self._unsettled: set[tuple[int, str]] = set()  # the places of buffers that a program may write to
        self._eager = False
        self._packs = None if packing is None else PackedWeights(packing)

    def fold(
        self,
        module: GraphModule,
        sources: Mapping[Node, Source],
        root: nn.Module,
        written: set[object],
        watch: Callable[[Pass, GraphModule], None],
    ) -> dict[Node, Source]:
        """Make the graph of *module* read rounded copies and derived tensors; the sources that it then has.

        Args:
            module: A rewritten graph.
            sources: What its ``get_attr`` nodes stand for.
            root: The module that the places of the sources are in.
            written: The targets of the sources that the call writes to, or puts others in the place of.
            watch: As for ``run_passes``.

        Raises:
            FrozenError: It reads the float32 values of a weight that has none, or writes to a weight.
        """
        tensors = {
            str(node.target): source.slot(root)[source.name]
            for node, source in sources.items()
            if isinstance(source, Place) and source.kind == "_parameters"
        }
        self._refuse_writes(tensors, written)
        foldable = {
            name: tensor.is_contiguous()
            for name, tensor in tensors.items()
            if id(tensor) not in self._unfolded and name not in written
        }
        if MakeBySize().run(module.graph):
            RemoveDeadCode().run(module.graph)
        casts = FoldWeightCasts(foldable)
        casts.run(module.graph)
        watch(casts, module)
        read = self._read(module.graph, tensors)
        read |= {str(node.target): tensor for node, tensor in _constants(sources)}
        places = _places(sources, root)
        self._unsettle([slot for target, slot in places.items() if target in written])
        buffers = self._settled(places, root)
        read |= {target: holder[name] for target, (holder, name) in buffers.items()}
        changing = {*written, *(tensors.keys() - foldable.keys())}
        fixed = {target for target, tensor in read.items() if target not in changing and has_version(tensor)}
        arithmetic = FoldWeightArithmetic(frozenset(fixed))
        arithmetic.run(module.graph)
        watch(arithmetic, module)
        found: dict[Node, Source] = {}
        for node in filter(is_source, module.graph.nodes):
            if "derived" in node.meta:
                targets = node.meta["derived"].sources
                given = [buffers.get(target) or _slot(read[target]) for target in targets]
                derived = self._derived.of(node, given, [buffers[t] for t in targets if t in buffers])
                found[node] = Constant(derived.value)
                node.meta["unrounded"] = derived.unrounded
            else:
                found[node] = sources.get(node) or Constant(read[str(node.target)])
        return found

    def _read(self, graph: Graph, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights that *graph* reads, rounded copies among them, by their targets in it."""
        read: dict[str, torch.Tensor] = {}
        for node in filter(is_source, graph.nodes):
            target = str(node.target)
            if "rounded" in node.meta:
                name, dtype = node.meta["rounded"]
                read[target] = self.rounded(weights[name], dtype, node)
            elif isinstance(weights.get(target), RoundedWeight):
                raise FrozenError(_needs_float32(node))
            elif target in weights:
                read[target] = weights[target]
        return read

    def _settled(self, places: Mapping[str, Slot], root: nn.Module) -> dict[str, Slot]:
        """The *places* of buffers that nothing is known to write to but what a version tells."""
        if self._eager or not places:
            return {}
        memories = Counter(_memory(tensor) for tensor, _ in places_of(root).values())
        return {
            target: (holder, name)
            for target, (holder, name) in places.items()
            if (id(holder), name) not in self._unsettled
            and has_version(holder[name])
            and memories[_memory(holder[name])] == 1
        }

    def _unsettle(self, slots: Sequence[Slot]) -> None:
        """Compute what is derived of the buffers in *slots* anew in each call."""
        self._unsettled |= {(id(holder), name) for holder, name in slots}
        for derived in self._derived.all():
            derived.settled = derived.settled and not any(map(derived.reads, slots))

    def expect_eager_code(self) -> None:
        """Eager code is going to run, which may do anything to buffers."""
        self._eager = True
        for derived in self._derived.all():
            derived.settled = derived.settled and not derived.buffers

    def _refuse_writes(self, tensors: Mapping[str, torch.Tensor], written: set[object]) -> None:
        copied = {identity for identity, _ in self._copies}
        for name, tensor in tensors.items():
            if name in written and (isinstance(tensor, RoundedWeight) or id(tensor) in copied):
                raise FrozenError(f"forward writes to the weight {name!r}, which is frozen")

    def rounded(self, weight: torch.Tensor, dtype: torch.dtype, node: Node) -> torch.Tensor:
        """The one copy of *weight* in *dtype*; made if there is none yet."""
        if isinstance(weight, RoundedWeight):
            if weight.low.dtype is dtype:
                return weight.low
            raise FrozenError(_needs_float32(node))
        key = id(weight), dtype
        if key not in self._copies:
            self._copies.setdefault(key, _Copy(weight, dtype))  # another thread may have been faster
        return self._copies[key].low

    def refresh(self) -> None:
        """Round and compute anew what has been written to, and forget what was packed."""
        for copy in self._copies.values():
            copy.refresh()
        for derived in self._derived.all():
            derived.refresh()
        if self._packs is not None:
            self._packs.forget()

    def watch(
        self, graph: Graph, sources: Mapping[Node, Source], slots: Sequence[Slot], root: nn.Module
    ) -> FrozenTensors:
        """The tensors in *slots*, those of *graph*'s *sources* in their order."""
        nodes = [node for node in graph.nodes if is_source(node)]
        read = {id(holder[name]) for holder, name in slots}
        derived = [each for each in self._derived.all() if id(each.value) in read]
        read |= {id(tensor) for each in derived for tensor in each.sources}
        return FrozenTensors(
            slots,
            root,
            changing=[index for index, node in enumerate(nodes) if _may_change(sources[node])],
            copies=[copy for copy in self._copies.values() if id(copy.low) in read],
            derived=derived,
        )

    def packed_code(
        self,
        graph: Graph,
        sources: Mapping[Node, Source],
        keep_cast: Callable[..., torch.Tensor] | None,
        plain: FlatCode,
    ) -> PackedCode | None:
        """The flat code of *graph* that may read packed weights; ``None`` if there is nothing to pack.

        Args:
            graph: A graph as :meth:`fold` leaves it.
            sources: What its ``get_attr`` nodes stand for.
            keep_cast: See :func:`~fxamp.runtime.lower.lower`.
            plain: Its flat code.
        """
        if self._packs is None:
            return None
        tensors = {node: source.tensor for node, source in sources.items() if isinstance(source, Constant)}
        return self._packs.code(graph, tensors, keep_cast, plain)

    def prepacked(self) -> tuple[Prepacked, ...]:
        """What became of each weight that a linear layer reads; ``()`` if none is to be packed."""
        return () if self._packs is None else self._packs.told()

    def packed_bytes(self) -> int:
        """What the packed copies take."""
        return 0 if self._packs is None else self._packs.bytes()

    def copies(self) -> list[torch.Tensor]:
        """The rounded copies that are kept beside float32 weights."""
        return [copy.low for copy in self._copies.values()]

    def derived(self) -> list[torch.Tensor]:
        """The tensors that are kept beside the weights that they are computed from."""
        return [derived.value for derived in self._derived.all()]


class _Copy:
    """A rounded copy beside a float32 weight."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        with torch.inference_mode(mode=False), torch.no_grad():
            self.low = weight.to(dtype)
        self._version = weight._version

    def refresh(self) -> None:
        """Round the weight anew if it was written to."""
        if self.weight._version != self._version:
            self._version = self.weight._version
            with torch.inference_mode(mode=False), torch.no_grad():
                self.low.copy_(self.weight)


class FrozenTensors:
    """The tensors that a program of a frozen module reads.

    Parameters and constants are the same objects for good.  Only what ``forward`` may put another tensor
    into, buffers and plain attributes, is read anew.

    Args:
        slots: Where the program's tensors are.
        root: The module tree.
        changing: The indices of those that are read anew.
        copies: Those among them that are beside a float32 weight, which somebody might write to, and those
            that the derived ones are computed from.
        derived: Those among them that are computed from others.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        root: nn.Module,
        *,
        changing: Sequence[int],
        copies: Sequence[_Copy],
        derived: Sequence[Derived],
    ) -> None:
        self._tensors = [holder[name] for holder, name in slots]
        self._changing = tuple(changing)
        self._kept: tuple[_Copy | Derived, ...] = (*copies, *derived)  # copies first: the others read them
        read = [slots[index] for index in changing]
        read += [slot for slot in _distinct(derived) if not any(map(_is_same, repeat(slot), read))]
        self._watch = TensorWatch(read, root) if read else None

    def read(self) -> list[torch.Tensor] | None:
        """The tensors; ``None`` if a buffer is not what was captured."""
        now = self._watch.read() if self._watch is not None else ()
        if now is None:
            return None
        for kept in self._kept:
            kept.refresh()
        if not self._changing:
            return self._tensors
        tensors = self._tensors.copy()
        for index, tensor in zip(self._changing, now, strict=False):  # behind them: what is derived from
            tensors[index] = tensor
        return tensors

    @property
    def is_empty(self) -> bool:
        """Whether the program reads none."""
        return not self._tensors

    @property
    def settled(self) -> bool:
        """Whether all that is derived changes only where a version tells so."""
        return all(kept.settled for kept in self._kept if isinstance(kept, Derived))

    def difference(self) -> str:
        """What has changed, for people; ``""`` if nothing has."""
        return "" if self._watch is None else self._watch.difference()


def _constants(sources: Mapping[Node, Source]) -> Iterator[tuple[Node, torch.Tensor]]:
    """The constants that are no weights of some module which is no part of the model."""
    for node, source in sources.items():
        tensor = source.tensor if isinstance(source, Constant) else None
        if type(tensor) is torch.Tensor and not tensor.requires_grad:
            yield node, tensor


def _places(sources: Mapping[Node, Source], root: nn.Module) -> dict[str, Slot]:
    """Where the buffers, and tensors in plain attributes, are that a graph reads, by their targets."""
    return {
        str(node.target): (source.slot(root), source.name)
        for node, source in sources.items()
        if _may_change(source) and isinstance(source, Place)
    }


def _slot(tensor: torch.Tensor) -> Slot:
    return {"": tensor}, ""


def _distinct(derived: Sequence[Derived]) -> list[Slot]:
    """Where the buffers are that *derived* are computed from, each once."""
    return list(
        {(id(holder), name): (holder, name) for each in derived for holder, name in each.buffers}.values()
    )


def _is_same(one: Slot, other: Slot) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def _memory(tensor: torch.Tensor) -> int:
    return (
        tensor.untyped_storage()._cdata
        if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
        else -1
    )


def _may_change(source: Source) -> bool:
    return isinstance(source, Place) and source.kind != "_parameters"


def _needs_float32(node: Node) -> str:
    users: list[Any] = [locate(user) for user in node.users]
    return (
        f"a call needs the float32 weight {node.target!r}, of which only the low precision copy is kept\n"
        f"  used by {users[0] if users else 'the result'}\n"
        "  freeze again with an example of such a call:  fxamp.freeze(amp, example_args)"
    )
