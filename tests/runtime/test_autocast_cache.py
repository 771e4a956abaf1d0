"""The cast that eager autocast keeps, read from its cache."""

from __future__ import annotations

import pytest
import torch

from fxamp.runtime.autocast_cache import cached_cast
from tests.models import autocast, equal

SHAPES = [(4,), (8, 4), (3, 8, 4), (8, 3, 3, 3), (2, 3, 4, 5, 6), (0, 4), (4, 0), (1, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_same_tensor_every_time(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, requires_grad=True)
    with autocast(dtype):
        one = cached_cast(weight, dtype)
        with torch.no_grad():
            other = cached_cast(weight, dtype)
    assert one is other
    assert one.requires_grad
    assert equal(one, weight.to(dtype))


@pytest.mark.parametrize(
    "layout", [torch.channels_last, torch.contiguous_format], ids=["channels last", "contiguous"]
)
def test_the_order_of_dimensions_in_memory_makes_no_difference(layout: torch.memory_format) -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=layout).requires_grad_()
    with autocast(torch.bfloat16):
        assert cached_cast(weight, torch.bfloat16) is cached_cast(weight, torch.bfloat16)


def test_it_is_the_one_that_eager_autocast_uses() -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with autocast(torch.bfloat16):
        theirs = torch.mm(weight, x).grad_fn
        ours = cached_cast(weight, torch.bfloat16)
    assert theirs is not None
    assert theirs.next_functions[0][0] is ours.grad_fn


def test_the_end_of_the_outermost_region_ends_it() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with autocast(torch.bfloat16):
        with autocast(torch.bfloat16):
            one = cached_cast(weight, torch.bfloat16)
        assert cached_cast(weight, torch.bfloat16) is one
    with autocast(torch.bfloat16):
        assert cached_cast(weight, torch.bfloat16) is not one


def test_the_state_of_autocast_stays_as_it_was() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16, enabled=False):
        cached_cast(weight, torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16


def test_a_checkpoint_around_it_packs_nothing_of_it() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    packed: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda nothing: weight)
    with autocast(torch.bfloat16), hooks:
        cached_cast(weight, torch.bfloat16)
    assert packed == []
