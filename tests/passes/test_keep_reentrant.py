"""Kernels that consult autocast themselves run in the region that they were captured in."""

from __future__ import annotations

import torch

from fxamp.ir.regions import Region
from fxamp.passes.keep_reentrant import KeepReentrant
from tests.passes.checks import check, prepared


def test_a_kernel_that_consults_autocast_is_called_in_a_region() -> None:
    check(
        KeepReentrant,
        lambda x: torch.roll(x, 1).relu(),
        torch.ones(4),
        before="""
            %x: f32[4] = input
            %roll: f32[4] = roll(%x, [1])
            %relu: f32[4] = relu(%roll)
            return [%relu]
        """,
        after="""
            %x: f32[4] = input
            %roll: f32[4] = run_in_region(autocast(cpu, bf16), aten::roll, %x, [1])
            %relu: f32[4] = relu(%roll)
            return [%relu]
        """,
    )


def test_in_a_region_that_is_off_it_is_called_as_any_other() -> None:
    off = Region("cpu", enabled=False, dtype=torch.bfloat16)
    ready = prepared(KeepReentrant, lambda x: torch.roll(x, 1), torch.ones(4), region=off)
    assert not ready.step(ready.module)
