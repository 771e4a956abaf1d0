"""Each cast is written where eager autocast makes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxamp.ir.regions import Region
from fxamp.ir.text import show
from fxamp.passes.insert_casts import InsertCasts
from fxamp.policy import Policy
from tests.passes.checks import check, prepared

CUDA = Policy.native("cuda", torch.float16).on("cpu")
F16 = Region("cpu", enabled=True, dtype=torch.float16)


def test_casts_are_written_right_to_left() -> None:
    check(
        InsertCasts,
        lambda x, y: torch.addmm(x, x, y),
        torch.ones(4, 4),
        torch.ones(4, 4),
        before="""
            %x: f32[4, 4] = input
            %y: f32[4, 4] = input
            %addmm: bf16[4, 4] = addmm(%x, %x, %y)
            return [%addmm]
        """,
        after="""
            %x: f32[4, 4] = input
            %y: f32[4, 4] = input
            %y_bf16: bf16[4, 4] = to(%y, bf16)
            %x_bf16: bf16[4, 4] = to(%x, bf16)
            %x_bf16_1: bf16[4, 4] = to(%x, bf16)
            %addmm: bf16[4, 4] = addmm(%x_bf16_1, %x_bf16, %y_bf16)
            return [%addmm]
        """,
    )


def test_the_elements_of_a_list_are_cast_left_to_right() -> None:
    check(
        InsertCasts,
        lambda x, y, z: torch.cat([x, y, z]),
        torch.ones(1, dtype=torch.bfloat16),
        torch.ones(1),
        torch.ones(1, dtype=torch.float16),
        before="""
            %x: bf16[1] = input
            %y: f32[1] = input
            %z: f16[1] = input
            %cat: f32[3] = cat([%x, %y, %z])
            return [%cat]
        """,
        after="""
            %x: bf16[1] = input
            %y: f32[1] = input
            %z: f16[1] = input
            %x_f32: f32[1] = to(%x, f32)
            %z_f32: f32[1] = to(%z, f32)
            %cat: f32[3] = cat([%x_f32, %y, %z_f32])
            return [%cat]
        """,
    )


def test_an_activation_is_cast_anew_at_every_use() -> None:
    def twice(x: Tensor) -> Tensor:
        y = x.relu()
        return torch.mm(torch.mm(y, y), y)

    check(
        InsertCasts,
        twice,
        torch.ones(4, 4),
        before="""
            %x: f32[4, 4] = input
            %relu: f32[4, 4] = relu(%x)
            %mm: bf16[4, 4] = mm(%relu, %relu)
            %mm_1: bf16[4, 4] = mm(%mm, %relu)
            return [%mm_1]
        """,
        after="""
            %x: f32[4, 4] = input
            %relu: f32[4, 4] = relu(%x)
            %relu_bf16: bf16[4, 4] = to(%relu, bf16)
            %relu_bf16_1: bf16[4, 4] = to(%relu, bf16)
            %mm: bf16[4, 4] = mm(%relu_bf16_1, %relu_bf16)
            %relu_bf16_2: bf16[4, 4] = to(%relu, bf16)
            %mm_1: bf16[4, 4] = mm(%mm, %relu_bf16_2)
            return [%mm_1]
        """,
    )


def test_a_weight_is_cast_once_at_its_first_use() -> None:
    check(
        InsertCasts,
        lambda x, w: torch.mm(torch.mm(x.relu(), w), w),
        torch.ones(2, 4),
        torch.ones(4, 4, requires_grad=True),
        before="""
            %x: f32[2, 4] = input
            %w: f32[4, 4] = input
            %relu: f32[2, 4] = relu(%x)
            %mm: bf16[2, 4] = mm(%relu, %w)
            %mm_1: bf16[2, 4] = mm(%mm, %w)
            return [%mm_1]
        """,
        after="""
            %x: f32[2, 4] = input
            %w: f32[4, 4] = input
            %relu: f32[2, 4] = relu(%x)
            %w_bf16: bf16[4, 4] = to(%w, bf16)
            %relu_bf16: bf16[2, 4] = to(%relu, bf16)
            %mm: bf16[2, 4] = mm(%relu_bf16, %w_bf16)
            %mm_1: bf16[2, 4] = mm(%mm, %w_bf16)
            return [%mm_1]
        """,
    )


def test_the_cast_of_a_weight_first_used_under_no_grad_records_gradients() -> None:
    def frozen_then_trained(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.mm(x, w)
        return torch.mm(y, w)

    check(
        InsertCasts,
        frozen_then_trained,
        torch.ones(2, 4),
        torch.ones(4, 4, requires_grad=True),
        before="""
            %x: f32[2, 4] = input
            %w: f32[4, 4] = input
            _set_grad_enabled(False)
            %mm: bf16[2, 4] = mm(%x, %w)
            _set_grad_enabled(True)
            %mm_1: bf16[2, 4] = mm(%mm, %w)
            return [%mm_1]
        """,
        after="""
            %x: f32[2, 4] = input
            %w: f32[4, 4] = input
            _set_grad_enabled(False)
            _set_grad_enabled(True)
            %w_bf16: bf16[4, 4] = to(%w, bf16)
            _set_grad_enabled(False)
            %x_bf16: bf16[2, 4] = to(%x, bf16)
            %mm: bf16[2, 4] = mm(%x_bf16, %w_bf16)
            _set_grad_enabled(True)
            %mm_1: bf16[2, 4] = mm(%mm, %w_bf16)
            return [%mm_1]
        """,
    )


@pytest.mark.parametrize(
    ("weight", "region"),
    [
        (torch.ones(4, 4), F16),
        (torch.ones(4, 4, requires_grad=True), Region("cpu", enabled=True, dtype=torch.float16, cache=False)),
        (torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True), F16),
        (torch.ones(4, 4, requires_grad=True).t(), F16),
        (torch.ones(4, 4, requires_grad=True) * 1, F16),
    ],
    ids=["frozen", "without cache", "not float32", "a view", "no leaf"],
)
def test_what_eager_does_not_keep_is_cast_at_every_use(weight: Tensor, region: Region) -> None:
    ready = prepared(InsertCasts, lambda x: torch.mm(torch.mm(x, x), x), weight, region=region)
    ready.step(ready.module)
    assert sum("inserted" in node.meta for node in ready.module.graph.nodes) == 3


def test_in_inference_mode_no_cast_is_kept() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.inference_mode():
        ready = prepared(InsertCasts, lambda w: torch.mm(torch.mm(w, w), w), weight)
        ready.step(ready.module)
    assert sum("inserted" in node.meta for node in ready.module.graph.nodes) == 3


def test_an_operator_that_gives_back_its_argument_does_not_part_a_weight_from_its_cast() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    ready = prepared(InsertCasts, lambda w: torch.mm(torch.mm(w.relu(), w), w.float()), weight)
    ready.step(ready.module)
    assert sum("kept" in node.meta for node in ready.module.graph.nodes) == 1


def test_a_region_of_another_dtype_gets_the_cast_that_the_outer_one_keeps() -> None:
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w)
        with torch.autocast("cpu", dtype=torch.float16):
            return torch.mm(w, w) + y

    check(
        InsertCasts,
        mixed,
        torch.ones(4, 4, dtype=torch.bfloat16),
        torch.ones(4, 4, requires_grad=True),
        before="""
            %x: bf16[4, 4] = input
            %w: f32[4, 4] = input
            %mm: bf16[4, 4] = mm(%x, %w)
            %mm_1: bf16[4, 4] = mm(%w, %w)
            %add: bf16[4, 4] = add(%mm_1, %mm)
            return [%add]
        """,
        after="""
            %x: bf16[4, 4] = input
            %w: f32[4, 4] = input
            %w_bf16: bf16[4, 4] = to(%w, bf16)
            %mm: bf16[4, 4] = mm(%x, %w_bf16)
            %mm_1: bf16[4, 4] = mm(%w_bf16, %w_bf16)
            %add: bf16[4, 4] = add(%mm_1, %mm)
            return [%add]
        """,
    )


def test_another_region_casts_to_another_dtype() -> None:
    def mixed(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x, x)
        with torch.autocast("cpu", dtype=torch.float16):
            return torch.mm(x, y)

    check(
        InsertCasts,
        mixed,
        torch.ones(4, 4),
        before="""
            %x: f32[4, 4] = input
            %mm: f32[4, 4] = mm(%x, %x)
            %mm_1: f16[4, 4] = mm(%x, %mm)
            return [%mm_1]
        """,
        after="""
            %x: f32[4, 4] = input
            %mm: f32[4, 4] = mm(%x, %x)
            %mm_f16: f16[4, 4] = to(%mm, f16)
            %x_f16: f16[4, 4] = to(%x, f16)
            %mm_1: f16[4, 4] = mm(%x_f16, %mm_f16)
            return [%mm_1]
        """,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_never_cast(dtype: torch.dtype) -> None:
    ready = prepared(InsertCasts, lambda x, y: torch.cat([x, y]), torch.ones(2, dtype=dtype), torch.ones(2))
    assert not ready.step(ready.module)


def test_a_softmax_on_cuda_gets_a_dtype_instead_of_a_cast() -> None:
    check(
        InsertCasts,
        lambda x: torch.softmax(x, 1).cumsum(0),
        torch.ones(2, 4, dtype=torch.float16),
        policy=CUDA,
        region=F16,
        before="""
            %x: f16[2, 4] = input
            %softmax: f16[2, 4] = softmax(%x, 1)
            %cumsum: f16[2, 4] = cumsum(%softmax, 0)
            return [%cumsum]
        """,
        after="""
            %x: f16[2, 4] = input
            %softmax: f16[2, 4] = softmax(%x, 1, dtype=f32)
            %cumsum: f16[2, 4] = cumsum(%softmax, 0, dtype=f32)
            return [%cumsum]
        """,
    )


def test_a_dtype_that_the_model_gives_stays() -> None:
    ready = prepared(
        InsertCasts,
        lambda x: torch.softmax(x, 1, dtype=torch.float16),
        torch.ones(2, 4),
        policy=CUDA,
        region=F16,
    )
    assert not ready.step(ready.module)


def test_an_operator_without_a_dtype_argument_is_exchanged_for_the_one_that_has_it() -> None:
    check(
        InsertCasts,
        lambda x: torch.ops.aten.norm.Scalar(x, 2),
        torch.ones(2, 4, dtype=torch.float16),
        policy=CUDA,
        region=F16,
        before="""
            %x: f16[2, 4] = input
            %norm: f16[] = norm(%x)
            return [%norm]
        """,
        after="""
            %x: f16[2, 4] = input
            %norm: f16[] = norm(%x, 2, dtype=f32)
            return [%norm]
        """,
    )


def _under_no_grad(rank: int) -> str:
    weight = torch.nn.Parameter(torch.ones(4, 4))

    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.linear(x, weight)

    step = prepared(InsertCasts, model, torch.ones(*[2] * (rank - 1), 4))
    step.step(step.module)
    return show(step.module)


def test_under_no_grad_a_cast_records_gradients_only_for_who_looks_at_them() -> None:
    assert "_set_grad_enabled(True)\n%_constant0_bf16" in _under_no_grad(3)
    assert "_set_grad_enabled(True)\n%_constant0_bf16" not in _under_no_grad(2)
