"""A rounded weight looks like the float32 parameter, and gives its values to nobody."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxamp.errors import FrozenError
from fxamp.ir.rounded_weight import RoundedWeight


def _weight() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t()


def _rounded() -> RoundedWeight:
    return RoundedWeight(_weight().bfloat16())


def test_it_has_the_class_dtype_sizes_and_strides_of_the_float32_parameter() -> None:
    weight = _rounded()
    assert isinstance(weight, nn.Parameter)
    assert weight.dtype is torch.float32
    assert weight.shape == (4, 6)
    assert weight.stride() == _weight().stride()
    assert weight.is_leaf
    assert not weight.requires_grad
    assert "stored as torch.bfloat16" in repr(weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: torch.nn.functional.linear(torch.ones(1, 6), weight),
        lambda weight: weight.float().sum().item(),
        lambda weight: weight.to(torch.float16),
        lambda weight: weight.t().contiguous(),
        lambda weight: weight.mul_(2),
        lambda weight: weight.numpy(),
        lambda weight: torch.ones(4, 6).copy_(weight),
    ],
)
def test_every_use_of_its_values_raises(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises((FrozenError, RuntimeError), match=r"float32 weight|numpy|Numpy"):
        use(_rounded())


def test_under_autocast_an_operator_gets_what_is_stored_and_raises_for_another_dtype() -> None:
    weight, x = _weight(), torch.randn(1, 6)
    rounded = RoundedWeight(weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nn.functional.linear(x, rounded), nn.functional.linear(x, weight))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(FrozenError, match="freeze again with an example"),
    ):
        nn.functional.linear(x, rounded)


def test_a_cast_to_the_dtype_that_is_stored_is_a_copy() -> None:
    weight = _rounded()
    cast = weight.to(torch.bfloat16)
    assert torch.equal(cast, weight.low)
    assert cast.stride() == weight.stride()
    cast.zero_()
    assert weight.low.any()


def test_what_is_copied_into_it_is_rounded_by_the_cast_of_autocast() -> None:
    weight, new = _rounded(), _weight() * 3
    with torch.no_grad():
        weight.copy_(new)
    assert torch.equal(weight.low, new.bfloat16())


def test_float64_is_rounded_by_way_of_float32_as_in_the_model() -> None:
    value = torch.randn(4, 6, dtype=torch.float64)
    weight = _rounded()
    with torch.no_grad():
        weight.copy_(value)
    assert torch.equal(weight.low, value.float().bfloat16())


def test_an_alias_has_the_same_storage_and_a_copy_its_own() -> None:
    weight = _rounded()
    alias = weight.detach()
    assert isinstance(alias, RoundedWeight)
    assert alias.low.data_ptr() == weight.low.data_ptr()
    pair = copy.deepcopy([weight, weight])
    assert pair[0] is pair[1]
    assert pair[0].low.data_ptr() != weight.low.data_ptr()
    assert pair[0].low.stride() == weight.low.stride()


def test_it_is_saved_and_loaded() -> None:
    weight, file = _rounded(), io.BytesIO()
    torch.save([weight, weight], file)
    file.seek(0)
    one, two = torch.load(file, weights_only=False)
    assert one is two
    assert torch.equal(one.low, weight.low)


def test_a_write_shows_in_the_version_of_what_is_stored() -> None:
    weight = RoundedWeight(torch.zeros(2, dtype=torch.bfloat16))
    before = weight.low._version
    with torch.no_grad():
        weight.copy_(torch.ones(2))
    assert weight.low._version > before
