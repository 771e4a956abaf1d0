"""The state of autocast and of gradients moves from marks onto the nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from fxamp.ir.regions import Region
from fxamp.passes.flatten_regions import FlattenRegions
from tests.passes.checks import BF16, check, prepared


def _nested(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = torch.mm(x, y)
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        x = torch.mm(x, y)
    return torch.mm(x, y)


def test_marks_go_and_every_node_knows_the_state_of_the_innermost_block() -> None:
    ready = check(
        FlattenRegions,
        _nested,
        torch.ones(2, 4),
        torch.ones(4, 4),
        before="""
            %x: f32[2, 4] = input
            %y: f32[4, 4] = input
            enter_region(autocast(cpu, off))
            %mm: f32[2, 4] = mm(%x, %y)
            enter_region(autocast(cpu, f16))
            _set_grad_enabled(False)
            %mm_1: f16[2, 4] = mm(%mm, %y)
            enter_region(autocast(cpu, bf16))
            _set_grad_enabled(True)
            %mm_2: bf16[2, 4] = mm(%mm_1, %y)
            return [%mm_2]
        """,
        after="""
            %x: f32[2, 4] = input
            %y: f32[4, 4] = input
            %mm: f32[2, 4] = mm(%x, %y)
            _set_grad_enabled(False)
            %mm_1: f16[2, 4] = mm(%mm, %y)
            _set_grad_enabled(True)
            %mm_2: bf16[2, 4] = mm(%mm_1, %y)
            return [%mm_2]
        """,
    )
    assert ready.node("mm").meta["region"] == Region("cpu", enabled=False, dtype=torch.bfloat16)
    assert ready.node("mm_1").meta["region"] == Region("cpu", enabled=True, dtype=torch.float16)
    assert ready.node("mm_2").meta["region"] == BF16
    assert [ready.node(name).meta["grad"] for name in ("mm", "mm_1", "mm_2")] == [True, False, True]


def test_a_graph_without_marks_is_in_the_region_of_its_call() -> None:
    ready = prepared(FlattenRegions, torch.relu, torch.ones(2))
    assert ready.step(ready.module)
    assert [node.meta["region"] for node in ready.module.graph.nodes] == [BF16] * 3


def test_the_graph_of_a_call_without_gradients_begins_without() -> None:
    with torch.no_grad():
        ready = prepared(FlattenRegions, torch.relu, torch.ones(2))
    ready.step(ready.module)
    assert not any(node.meta["grad"] for node in ready.module.graph.nodes)
