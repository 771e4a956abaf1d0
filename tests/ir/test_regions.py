"""States of autocast: observed, entered, switched off without a trace."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fxamp.ir.regions import Region, no_autocast, observe_region, run_in_region, runner_in_region

BF16 = Region("cpu", enabled=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_a_region_that_is_entered_is_the_one_observed(
    enabled: bool,
    dtype: torch.dtype,
    cache: bool,
) -> None:
    region = Region("cpu", enabled, dtype, cache)
    before = observe_region("cpu")
    with region.context():
        assert observe_region("cpu") == region
    assert observe_region("cpu") == before


def test_a_region_prints_its_state() -> None:
    assert str(BF16) == "autocast(cpu, bf16)"
    assert (
        str(Region("cuda", enabled=False, dtype=torch.float16, cache=False))
        == "autocast(cuda, off, no cache)"
    )


def test_an_operator_can_be_run_in_a_region() -> None:
    x = torch.ones(2, 2)
    result = run_in_region(BF16, torch.mm, x, x)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_no_autocast_switches_off_and_leaves_the_surrounding_region_as_it_was() -> None:
    x = torch.ones(2, 2)
    with BF16.context():
        with no_autocast():
            assert torch.mm(x, x).dtype == torch.float32
        assert observe_region("cpu") == BF16
        assert torch.mm(x, x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_no_autocast_leaves_the_casts_that_the_surrounding_region_keeps() -> None:
    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with BF16.context():
        first = torch.mm(x, weight)
        with no_autocast():
            torch.mm(x, weight)
        second = torch.mm(x, weight)
    cast, again = (result.grad_fn.next_functions[1][0] for result in (first, second) if result.grad_fn)
    assert cast is not None
    assert cast is again


def test_no_autocast_puts_the_state_back_after_an_error() -> None:
    with BF16.context():
        with pytest.raises(ZeroDivisionError), no_autocast():
            raise ZeroDivisionError
        assert observe_region("cpu") == BF16


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("around", [None, Region("cpu", enabled=True, dtype=torch.float16, cache=False)])
def test_a_runner_puts_its_operator_into_the_region_as_torch_does(
    enabled: bool, dtype: torch.dtype, cache: bool, around: Region | None
) -> None:
    region = Region("cpu", enabled, dtype, cache)
    run = runner_in_region(region, lambda: observe_region("cpu"))
    with nullcontext() if around is None else around.context():
        before = observe_region("cpu")
        assert run() == region
        assert observe_region("cpu") == before


def test_a_runner_keeps_casts_as_long_as_torch_does() -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    def casts() -> tuple[object, ...]:
        made = torch.mm(weight, weight).grad_fn
        assert made is not None
        return tuple(function for function, _ in made.next_functions)

    with BF16.context():
        kept = casts()
        assert runner_in_region(BF16, casts)() == kept
        assert run_in_region(BF16, casts) == kept
        assert casts() == kept
    assert runner_in_region(BF16, casts)() != kept


def test_a_runner_puts_everything_back_behind_an_error() -> None:
    def fails() -> None:
        raise ValueError("what it says")

    before = observe_region("cpu")
    with pytest.raises(ValueError, match="what it says"):
        runner_in_region(Region("cpu", enabled=True, dtype=torch.float16, cache=False), fails)()
    assert observe_region("cpu") == before
