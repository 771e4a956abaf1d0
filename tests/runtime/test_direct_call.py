"""A builtin stands in for an operator only where it reaches just that overload with just those arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from fxamp.capture.recording_mode import RecordingMode
from fxamp.runtime.direct_call import direct_call

aten = torch.ops.aten

CALLS: tuple[tuple[OpOverload, tuple[Any, ...], dict[str, Any]], ...] = (
    (aten.linear.default, (Tensor, Tensor, Tensor), {}),
    (aten.linear.default, (Tensor, Tensor), {}),
    (aten.conv2d.default, (Tensor, Tensor, Tensor, [1, 1], [0, 0], [1, 1], 1), {}),
    (aten.conv2d.padding, (Tensor, Tensor, None, [1, 1], "same"), {}),
    (aten.mm.default, (Tensor, Tensor), {}),
    (aten.addmm.default, (Tensor, Tensor, Tensor), {"beta": 2}),
    (aten.add.Tensor, (Tensor, Tensor), {}),
    (aten.add.Tensor, (Tensor, 1), {}),
    (aten.add_.Tensor, (Tensor, 1.5), {}),
    (aten.mul.Tensor, (Tensor, int), {}),
    (aten.pow.Tensor_Scalar, (Tensor, 2), {}),
    (aten.pow.Scalar, (2.0, Tensor), {}),
    (aten.softmax.int, (Tensor, 1), {"dtype": torch.float32}),
    (aten.softmax.int, (Tensor, 1, torch.float32), {}),
    (aten.sum.default, (Tensor,), {}),
    (aten.sum.dim_IntList, (Tensor, [0], True), {}),
    (aten.mean.dim, (Tensor, [-1], True), {}),
    (aten.max.dim, (Tensor, 0), {}),
    (aten.max.default, (Tensor,), {}),
    (aten.cat.default, ([Tensor, Tensor], 1), {}),
    (aten.view.default, (Tensor, [2, -1]), {}),
    (aten.view.dtype, (Tensor, torch.int32), {}),
    (aten.reshape.default, (Tensor, [int, 4]), {}),
    (aten.transpose.int, (Tensor, 0, 1), {}),
    (aten.select.int, (Tensor, 0, 1), {}),
    (aten.slice.Tensor, (Tensor, 0, 1, 3), {}),
    (aten.index.Tensor, (Tensor, [None, Tensor]), {}),
    (aten.dropout.default, (Tensor, 0.5, True), {}),
    (aten.layer_norm.default, (Tensor, [4], Tensor, Tensor), {}),
    (aten.scaled_dot_product_attention.default, (Tensor, Tensor, Tensor), {"is_causal": True}),
    (aten.to.dtype, (Tensor, torch.float16), {}),
    (aten.to.dtype, (Tensor, torch.float16, False, True), {}),
    (aten.masked_fill.Scalar, (Tensor, Tensor, float("-inf")), {}),
    (aten.clamp.default, (Tensor, None, 3.0), {}),
    (aten.ones.default, ([2, 3],), {"dtype": torch.float32, "pin_memory": False}),
    (aten.gelu.default, (Tensor,), {"approximate": "tanh"}),
    (aten.einsum.default, ("ij,jk->ik", [Tensor, Tensor]), {}),
    (aten.linalg_vector_norm.default, (Tensor, 2, [1], True), {"dtype": torch.float32}),
)


class _Reached(BaseException):
    """Carries the call that reached the dispatcher."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.func, self.arguments = func, _complete(func, args, kwargs)


def _complete(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Every argument by name, as text, defaults filled in."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {name: _text(given.get(name, defaults[name])) for name in names}


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return f"{type(value).__name__} {value}"


def _filled(value: Any) -> Any:
    """*value* with a tensor for every ``Tensor``, and a number for every class of numbers."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_filled, value))
    if isinstance(value, type):
        return {Tensor: torch.empty(0), int: 7, float: 7.5}[value]
    return value


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=lambda value: getattr(value, "name", str)())
def test_a_builtin_reaches_just_this_overload_with_these_arguments(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    builtin = direct_call(op, args, kwargs)
    if builtin is None:
        return
    filled = _filled(args)

    def stop(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        raise _Reached(func, args, kwargs)

    with enable_python_dispatcher(), RecordingMode(stop), pytest.raises(_Reached) as reached:
        builtin(*filled, **kwargs)
    assert reached.value.func is op
    assert reached.value.arguments == _complete(op, filled, kwargs)


def test_most_operators_of_a_model_have_a_builtin() -> None:
    missing = [op.name() for op, args, kwargs in CALLS if direct_call(op, args, kwargs) is None]
    assert len(missing) < len(CALLS) / 4, missing


def test_the_common_ones_are_direct() -> None:
    assert direct_call(aten.linear.default, (Tensor, Tensor, Tensor), {}) is torch._C._nn.linear
    assert direct_call(aten.mm.default, (Tensor, Tensor), {}) is torch.mm
    assert direct_call(aten.to.dtype, (Tensor, torch.float16), {}) is not None


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Scalar, (Tensor, 1)),
        (aten._to_copy.default, (Tensor,)),
        (torch.ops.aten.sym_size.int, (Tensor, 0)),
        (aten.mm.default, (Tensor, Tensor, {})),
    ],
)
def test_where_the_builtin_would_reach_something_else_there_is_none(
    op: OpOverload, args: tuple[Any, ...]
) -> None:
    assert direct_call(op, args, {}) is None


def test_numbers_of_another_class_are_another_call() -> None:
    assert direct_call(aten.pow.Tensor_Scalar, (Tensor, 2), {}) is not None
    assert direct_call(aten.pow.Tensor_Scalar, (Tensor, Tensor), {}) is None
