"""A linear layer of a frozen module, the packed copies of its weight, and what has been proven of its calls.

================================  ===========================================================
``linear(x, weight, bias)``       packs ``weight``
``addmm(bias, x, weight)``        packs ``weight.t()``
``mm(x, weight)``, ``matmul``     likewise
================================  ===========================================================

The weight is a rounded copy of one of the model's, or its transpose; the bias is a tensor of the model's.  A
verdict (``prepack.py``) is on calls of one kind: sizes, strides and threads.  A weight that was written to
since (its version tells) is packed and proven anew.
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

__all__ = ["MISALIGNED", "Form", "PackedLinear", "PackedWeight", "Proven", "form_of"]

_aten = torch.ops.aten
_TRANSPOSES = frozenset({_aten.t.default, _aten.numpy_T.default, _aten.mT.default})
_ALIGNMENT = 64  # bytes: a kernel may choose its code by it, so calls with other addresses stay plain

MISALIGNED = Verdict(None, "its input is at an odd address")
"""The verdict on one call, not on its kind."""


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
    """A linear layer in all its calls.

    Args:
        form: The operator and its operands.
        weight: The packed copies of its weight.

    Attributes:
        plain: What calls the operator.
    """

    def __init__(self, form: Form, weight: PackedWeight) -> None:
        self.form, self.weight = form, weight
        self.plain: Callable[..., Any] = direct_call(form.op, form.kinds, {}) or form.op
        self._verdicts: dict[Any, Verdict] = {}

    def verdict(self, args: tuple[Any, ...]) -> Verdict | None:
        """What holds for calls like that with *args*; ``None`` if this is no time to find out.

        Args:
            args: The operator's.
        """
        x, version = args[self.form.operands.x], args[self.form.operands.weight]._version
        if any(known.version != version for known in list(self._verdicts.values())):
            self.forget()
        kind = (x.shape, x.stride(), torch.get_num_threads(), torch._C._get_mkldnn_enabled())
        if kind not in self._verdicts:
            if len(self._verdicts) >= self.weight.packing.kinds:
                return Verdict(None, "too many kinds of calls", version)
            if x.layout is not torch.strided or x.dim() < 2 or not x.numel():
                return Verdict(None, "no rows", version)
        if x.data_ptr() % _ALIGNMENT:
            return MISALIGNED
        if not self.weight.lock.acquire(blocking=False):  # another thread is at it
            return None
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                known = self._verdicts.get(kind)
                if known is None:
                    self._verdicts[kind] = known = replace(
                        self._prove(args), version=version, shape=x.shape, stride=x.stride()
                    )
                return known
        finally:
            self.weight.lock.release()

    def _prove(self, args: tuple[Any, ...]) -> Verdict:
        operands, packing = self.form.operands, self.weight.packing
        x, weight = args[operands.x], args[operands.weight]
        rows = x.numel() // x.shape[-1]
        try:
            packed = self.weight.layout(weight.t() if operands.transposed else weight, rows)
        except RuntimeError as error:
            return Verdict(None, f"not packed: {str(error).splitlines()[0]}")
        if packed is None:
            return Verdict(None, f"it is packed for {packing.layouts} numbers of rows already")
        own = x.detach().clone() if x.is_inference() else x
        other = Proven(self, Verdict(packed, "", weight._version, x.shape, x.stride()), lambda: None)
        before, after = args[: operands.x], args[operands.x + 1 :]
        verdict = prove(
            packing,
            packed,
            own,
            lambda x: self.plain(*before, x, *after),
            lambda x: other(*before, x, *after),
        )
        if verdict.packed is not None:
            self.weight.layouts[rows] = packed
        return verdict

    def forget(self) -> None:
        """Drop all verdicts, and the packed copies with them."""
        self._verdicts, self.weight.layouts = {}, {}

    def told(self) -> Iterator[tuple[tuple[int, ...], Verdict]]:
        """The sizes of inputs, and what was found about such calls."""
        for (shape, *_), verdict in list(self._verdicts.items()):
            yield tuple(shape), verdict


class Proven:
    """What is called in place of the operator, in calls of a kind that a packed weight is proven for.

    Args:
        linear: The linear layer.
        verdict: With the packed weight.
        stale: Called where the weight was written to since; that call is plain.
    """

    __name__ = "packed_linear"

    def __init__(self, linear: PackedLinear, verdict: Verdict, stale: Callable[[], None]) -> None:
        assert verdict.packed is not None
        operands = linear.form.operands
        self._x, self._weight = operands.x, operands.weight
        self._bias = None if linear.form.bias is None else operands.bias
        self._plain, self._linear = linear.plain, linear.weight.packing.linear
        self._packed, self._version, self._stale = verdict.packed, verdict.version, stale
        self._shape, self._stride = verdict.shape, verdict.stride

    def __call__(self, *args: Any) -> Any:
        """What the operator gives for *args*, bit for bit."""
        if args[self._weight]._version != self._version:
            self._stale()
            return self._plain(*args)
        x = args[self._x]
        if x.data_ptr() % _ALIGNMENT or x.shape != self._shape or x.stride() != self._stride:
            return self._plain(*args)
        return self._linear(x, self._packed, None if self._bias is None else args[self._bias])
