"""Linear layers of a frozen module that read a packed weight in the calls for which that is proven.

In flat code a :class:`PackedLinear` stands where the operator would: it looks up the verdict for the sizes,
strides and threads of the call, and multiplies by the packed weight or calls the operator.  The first call
of a kind makes the proof (``prepack.py``), but not under a dispatch mode, which would see it.

================================  ===========================================================
``linear(x, weight, bias)``       packs ``weight``
``addmm(bias, x, weight)``        packs ``weight.t()``
``mm(x, weight)``, ``matmul``     likewise
================================  ===========================================================

The weight is a rounded copy of one of the model's, or its transpose; the bias is a tensor of the model's.
A weight that was written to since (its version tells) is packed and proven anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.ir.facts import fact_of_node
from fxamp.runtime.direct_call import direct_call
from fxamp.runtime.prepack import Packing, Verdict, prove

__all__ = ["Form", "PackedLinear", "PackedWeight", "form_of"]

_aten = torch.ops.aten
_TRANSPOSES = frozenset({_aten.t.default, _aten.numpy_T.default, _aten.mT.default})
_ALIGNMENT = 64  # bytes: a kernel may choose its code by it, so calls with other addresses stay plain


@dataclass(frozen=True)
class Operands:
    """Where an operator has its operands."""

    x: int
    weight: int
    bias: int | None
    transposed: bool


_OPERANDS: Mapping[object, Operands] = MappingProxyType(
    {
        _aten.linear.default: Operands(0, 1, 2, transposed=False),
        _aten.addmm.default: Operands(1, 2, 0, transposed=True),
        _aten.mm.default: Operands(0, 1, None, transposed=True),
        _aten.matmul.default: Operands(0, 1, None, transposed=True),
    }
)


@dataclass(frozen=True)
class Form:
    """A call that may read a packed weight.

    Attributes:
        op: The operator.
        weight: The source of the rounded weight.
        bias: That of the bias.
        turned: Whether what is packed is the transpose of the stored weight.
        operands: Where they are.
        kinds: The arguments, ``torch.Tensor`` for any tensor.
    """

    op: OpOverload
    weight: Node
    bias: Node | None
    turned: bool
    operands: Operands
    kinds: tuple[Any, ...]


def form_of(node: Node) -> Form | None:
    """What *node* is, if it is a linear layer by a rounded weight of the model."""
    operands = _OPERANDS.get(node.target)
    if operands is None or node.kwargs:
        return None
    weight, turned = node.args[operands.weight], operands.transposed
    while isinstance(weight, Node) and weight.target in _TRANSPOSES:
        weight, turned = weight.args[0], not turned
    if not isinstance(weight, Node) or "rounded" not in weight.meta or _dimensions(weight) != 2:
        return None
    has_bias = operands.bias is not None and len(node.args) > operands.bias
    bias = node.args[operands.bias] if has_bias else None  # type: ignore[index]
    if bias is not None and not (isinstance(bias, Node) and bias.op == "get_attr" and _dimensions(bias) == 1):
        return None
    assert isinstance(node.target, OpOverload)
    kinds = tuple(torch.Tensor if isinstance(arg, Node) else arg for arg in node.args)
    return Form(node.target, weight, bias, turned, operands, kinds)


def _dimensions(node: Node) -> int:
    fact = fact_of_node(node)
    return -1 if fact is None else len(fact.shape)


@dataclass
class PackedWeight:
    """The packed copies of one weight, or of its transpose.

    Attributes:
        name: The weight's.
        packing: How it is packed.
        layouts: The packed copies, by the number of rows that they are for.
        version: That of the weight when they were made.
    """

    name: str
    packing: Packing
    layouts: dict[int, torch.Tensor] = field(default_factory=dict)
    version: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def layout(self, matrix: torch.Tensor, rows: int) -> torch.Tensor | None:
        """*matrix* packed for so many rows; ``None`` if there are too many layouts already."""
        if matrix._version != self.version:
            self.layouts, self.version = {}, matrix._version
        known = self.layouts.get(rows)
        if known is not None or len(self.layouts) >= self.packing.layouts:
            return known
        return self.packing.pack(matrix, rows)


class PackedLinear:
    """Calls *form*'s operator, or multiplies by the packed weight where a proof allows it.

    Args:
        form: The operator and its operands.
        weight: The packed copies of its weight.
    """

    __name__ = "packed_linear"

    def __init__(self, form: Form, weight: PackedWeight) -> None:
        self._form, self._weight = form, weight
        self._plain: Callable[..., Any] = direct_call(form.op, form.kinds, {}) or form.op
        self._linear = weight.packing.linear
        self._verdicts: dict[Any, Verdict] = {}
        operands = form.operands
        self._x, self._w, self._b = operands.x, operands.weight, operands.bias if form.bias else None

    def __call__(self, *args: Any) -> Any:
        """What the operator gives for *args*, bit for bit."""
        x = args[self._x]
        if type(x) is not torch.Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
            return self._plain(*args)
        kind = (x.shape, x.stride(), torch.get_num_threads(), torch._C._get_mkldnn_enabled())
        verdict = self._verdicts.get(kind)
        if verdict is None or verdict.version != args[self._w]._version:
            verdict = self._judged(kind, args)
        if verdict is None or verdict.packed is None or x.data_ptr() % _ALIGNMENT:
            return self._plain(*args)
        return self._linear(x, verdict.packed, None if self._b is None else args[self._b])

    def _judged(self, kind: Any, args: tuple[Any, ...]) -> Verdict | None:
        """The verdict on calls of *kind*; ``None`` if this is no time, or there are too many kinds."""
        x, version = args[self._x], args[self._w]._version
        if any(verdict.version != version for verdict in list(self._verdicts.values())):
            self.forget()
        if kind not in self._verdicts and len(self._verdicts) >= self._weight.packing.kinds:
            return None
        if torch._C._len_torch_dispatch_stack() or x.data_ptr() % _ALIGNMENT or x.dim() < 2 or not x.numel():
            return None
        if not self._weight.lock.acquire(blocking=False):  # another thread is at it
            return None
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                known = self._verdicts.get(kind)  # another thread may have been faster
                if known is None:
                    self._verdicts[kind] = known = replace(self._verdict(args), version=version)
                return known
        finally:
            self._weight.lock.release()

    def _verdict(self, args: tuple[Any, ...]) -> Verdict:
        x, weight = args[self._x], args[self._w]
        matrix = weight.t() if self._form.operands.transposed else weight
        rows = x.numel() // x.shape[-1]
        try:
            packed = self._weight.layout(matrix, rows)
        except RuntimeError as error:
            return Verdict(None, f"not packed: {str(error).splitlines()[0]}")
        if packed is None:
            return Verdict(None, f"it is packed for {self._weight.packing.layouts} numbers of rows already")
        own = x.detach().clone() if x.is_inference() else x
        verdict = prove(self._weight.packing, packed, own, self._with(args), self._with(args, packed))
        if verdict.packed is not None:
            self._weight.layouts[rows] = packed
        return verdict

    def _with(
        self, args: tuple[Any, ...], packed: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A call with *args*, but for the input: plain, or as one that reads *packed*, look-up included."""
        trial = PackedLinear(self._form, self._weight)
        trial._verdicts = _All(Verdict(packed, "", args[self._w]._version))
        before, after = args[: self._x], args[self._x + 1 :]
        call = self._plain if packed is None else trial
        return lambda x: call(*before, x, *after)

    def forget(self) -> None:
        """Drop all verdicts, and the packed copies with them."""
        self._verdicts, self._weight.layouts = {}, {}

    @property
    def name(self) -> str:
        """The weight's."""
        return self._weight.name

    def told(self) -> Iterator[tuple[tuple[int, ...], Verdict]]:
        """The sizes of inputs, and what was found about such calls."""
        for (shape, *_), verdict in list(self._verdicts.items()):
            yield tuple(shape), verdict


class _All(dict[Any, Verdict]):
    """The same verdict for every kind of call."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self._verdict = verdict

    def get(self, key: Any, default: Any = None) -> Any:
        hash(key)  # what a look-up costs
        return self._verdict
