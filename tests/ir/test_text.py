"""A graph as text."""

from __future__ import annotations

from textwrap import dedent

import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fxamp.ir.regions import Region, run_in_region
from fxamp.ir.text import show
from fxamp.passes.insert_casts import InsertCasts
from tests.passes.checks import prepared


def _text(text: str) -> str:
    return dedent(text).strip()


def test_a_line_is_the_name_the_type_and_the_call() -> None:
    ready = prepared(InsertCasts, lambda x: x.chunk(2)[0].to(torch.float16) * 2.5, torch.ones(4, 2))
    assert show(ready.module) == _text("""
        %x: f32[4, 2] = input
        %chunk: (f32[2, 2], f32[2, 2]) = chunk(%x, 2)
        %getitem: f32[2, 2] = getitem(%chunk, 0)
        %getitem_1: f32[2, 2] = getitem(%chunk, 1)
        %to: f16[2, 2] = to(%getitem, f16)
        %mul: f16[2, 2] = mul(%to, 2.5)
        return [%mul]
    """)


def test_a_source_shows_its_place_in_the_model() -> None:
    ready = prepared(InsertCasts, nn.Linear(2, 2), torch.ones(1, 2))
    assert "%weight: f32[2, 2] = weight" in show(ready.module).splitlines()


def test_in_place_operators_keep_their_underscore_and_overloads_lose_their_name() -> None:
    ready = prepared(InsertCasts, lambda x: x.add_(1), torch.ones(2))
    assert "%add_: f32[2] = add_(%x, 1)" in show(ready.module)


def test_a_call_in_a_region_shows_the_region() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    region = Region("cpu", enabled=True, dtype=torch.bfloat16, cache=False)
    roll = graph.call_function(run_in_region, (region, torch.ops.aten.roll.default, x, [1]))  # type: ignore[arg-type]
    graph.output(roll)
    assert show(graph) == _text("""
        %x: ? = input
        %run_in_region: ? = run_in_region(autocast(cpu, bf16, no cache), aten::roll, %x, [1])
        return %run_in_region
    """)


def test_keyword_arguments_and_dictionaries_are_shown() -> None:
    def program(x: Tensor) -> dict[str, Tensor]:
        return {"y": torch.sum(x, dim=0)}

    assert show(symbolic_trace(program)) == _text("""
        %x: ? = input
        %sum_1: ? = sum(%x, dim=0)
        return {'y': %sum_1}
    """)


def test_sub_graphs_follow_indented_under_their_names() -> None:
    outer = symbolic_trace(lambda x: x.relu())
    outer.add_module("branch", symbolic_trace(lambda x: x.tanh()))
    assert show(outer) == _text("""
        %x: ? = input
        %relu: ? = relu(%x)
        return %relu
        branch:
            %x: ? = input
            %tanh: ? = tanh(%x)
            return %tanh
    """)
