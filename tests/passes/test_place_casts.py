"""Casts stand where they cost least, and never where a reader would see other strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from math import prod

import torch
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor, nn

from fxamp.capture.symbols import Sizes
from fxamp.passes import build_pipeline
from fxamp.passes.cast_regions import Region, Value
from fxamp.passes.clean_up import Level
from fxamp.passes.place_casts import PlaceCasts
from fxamp.passes.placements import (
    Placement,
    Prices,
    _cheapest,
    cheapest,
    price_of,
    price_of_present,
)
from fxamp.runtime.build_program import graph_module
from tests.passes.cast_programs import CastProgram, Model, cast_programs
from tests.passes.checks import CPU, Prepared, captured, check, prepared

ROWS = torch.ones(2, 4, 32)


def test_the_casts_of_all_slices_become_one_of_the_whole() -> None:
    def program(x: Tensor) -> Tensor:
        first, second = x.unbind(0)
        return torch.mm(first, second.t())

    check(
        PlaceCasts,
        program,
        ROWS,
        before="""
            %x: f32[2, 4, 32] = input
            %unbind: (f32[4, 32], f32[4, 32]) = unbind(%x)
            %getitem: f32[4, 32] = getitem(%unbind, 0)
            %getitem_1: f32[4, 32] = getitem(%unbind, 1)
            %t: f32[32, 4] = t(%getitem_1)
            %t_bf16: bf16[32, 4] = to(%t, bf16)
            %getitem_bf16: bf16[4, 32] = to(%getitem, bf16)
            %mm: bf16[4, 4] = mm(%getitem_bf16, %t_bf16)
            return [%mm]
        """,
        after="""
            %x: f32[2, 4, 32] = input
            %x_bf16: bf16[2, 4, 32] = to(%x, bf16)
            %unbind_1: (bf16[4, 32], bf16[4, 32]) = unbind(%x_bf16)
            %getitem_2: bf16[4, 32] = getitem(%unbind_1, 1)
            %t_1: bf16[32, 4] = t(%getitem_2)
            %getitem_3: bf16[4, 32] = getitem(%unbind_1, 0)
            %mm: bf16[4, 4] = mm(%getitem_3, %t_1)
            return [%mm]
        """,
    )


def test_a_cast_of_which_one_row_is_read_sinks_to_that_row() -> None:
    def program(x: Tensor) -> Tensor:
        return x.float()[1] * 2

    check(
        PlaceCasts,
        program,
        ROWS.bfloat16(),
        before="""
            %x: bf16[2, 4, 32] = input
            %to: f32[2, 4, 32] = to(%x, f32)
            %select: f32[4, 32] = select(%to, 0, 1)
            %mul: f32[4, 32] = mul(%select, 2)
            return [%mul]
        """,
        after="""
            %x: bf16[2, 4, 32] = input
            %select_1: bf16[4, 32] = select(%x, 0, 1)
            %select_f32: f32[4, 32] = to(%select_1, f32)
            %mul: f32[4, 32] = mul(%select_f32, 2)
            return [%mul]
        """,
    )


def test_a_gather_of_many_rows_is_made_of_the_cast_table() -> None:
    index = torch.arange(64) % 8

    def program(table: Tensor) -> Tensor:
        return torch.mm(table.index_select(0, index), table.t())

    ready = prepared(PlaceCasts, program, torch.ones(8, 1024))
    assert ready.step(ready.module)
    text = [
        f"{node.name}: {node.meta['fact']}" for node in ready.module.graph.nodes if "inserted" in node.meta
    ]
    assert text == ["table_bf16: bf16[8, 1024]"]


def test_a_cast_stays_behind_a_slice_with_gaps_and_before_a_write() -> None:
    def columns(x: Tensor) -> Tensor:
        return torch.mm(x[:, 0], x[:, 1].t())

    def written(x: Tensor) -> Tensor:
        first = torch.mm(x[0], x[1].t())
        x.mul_(2)
        return first

    for program in (columns, written):
        ready = prepared(PlaceCasts, program, torch.ones(2, 2, 32))
        assert not ready.step(ready.module)


def test_a_slice_that_begins_at_an_odd_place_keeps_its_cast() -> None:
    ready = prepared(PlaceCasts, lambda x: torch.mm(x[0], x[1]), torch.ones(2, 3, 3))
    assert not ready.step(ready.module)


def _regions(ready: Prepared) -> Iterator[Region]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for high, low in permutations(dtypes, 2):
        assert isinstance(ready.step, PlaceCasts)
        yield from ready.step.regions(ready.module.graph, high, low)


def test_the_price_of_a_placement_is_an_expression_in_the_sizes_too() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.mm(x.flatten(1), x.flatten(1).t())

    recorded = captured(program, torch.ones(6, 2, 8), sizes=Sizes.LEADING)
    module = graph_module(recorded.graph, recorded.sources, nn.Module())
    for step in build_pipeline(recorded, CPU):
        if isinstance(step, PlaceCasts):
            break
        step(module)
    (region,) = PlaceCasts(Level.INFERENCE_EXACT).regions(module.graph, torch.float32, torch.bfloat16)
    best = cheapest(region, Prices())
    price = price_of(region, best, Prices(symbolic=True))
    x = module.graph.find_nodes(op="placeholder")[0].meta["layout"]
    sizes = dict(zip(x.shape, x.example, strict=True))
    assert price.free_symbols == {size for size in x.shape if not isinstance(size, int)} != set()
    assert price - 2**15 - 6 * prod(x.shape) == 3  # one cast of all of it, and three views
    assert price.subs(sizes) == best.price


def _all_placements(region: Region, prices: Prices) -> Iterator[Placement]:
    """Every exact placement of a small region, by trying all."""
    high, needed = region.needed_high(), region.needed_low()
    low = [value for value in region.values if value in needed]
    for code in range(3 ** len(low)):
        state = {value: code // 3**index % 3 for index, value in enumerate(low)}  # high, cast, moved
        if all(_is_possible(value, state, high) for value in low):
            cast = frozenset(value for value, how in state.items() if how == 1)
            found = Placement(cast, frozenset(value for value, how in state.items() if how == 2), 0)
            yield replace(found, price=price_of(region, found, prices))


def _is_possible(value: Value, state: dict[Value, int], high: set[Value]) -> bool:
    how = state[value]
    if value.low_demands and how == 0:
        return False
    if how == 1 and not value.castable:
        return False
    if value.is_root:
        return how != 2 if value.high is not None else how == 2
    if how == 2:
        return all(state[parent] != 0 for parent in value.parents)
    return all(state[parent] != 2 or parent in high for parent in value.parents)


_MOVING = """
    to_bf16 to_f32 rows row transpose packed cat_self stack gather index_select flip expand halves unbound
    filled linear_as_it_is row_by_row rows_apart frozen_transposed filled_high scaled
"""


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
@given(program=cast_programs(_MOVING.split(), ("no_grad",)))
def test_no_exact_placement_of_a_small_region_is_cheaper(program: CastProgram) -> None:
    x = torch.randn(8, 32)
    model = Model(program).requires_grad_(requires_grad=False)
    try:
        with torch.no_grad():
            ready = prepared(PlaceCasts, model, x, x.clone(), x.bfloat16())
    except Exception:  # noqa: BLE001  eager raises as well
        return
    for region in _regions(ready):
        for prices in (Prices(), Prices(launch=0), Prices(launch=2**10, line=2**8)):
            best, most = cheapest(region, prices), sum(len(value.casts) for value in region.values)
            assert best.price == price_of(region, best, prices)
            assert _casts_in(best) <= most
            if len(region.needed_low()) <= 8:
                placements = list(_all_placements(region, prices))
                event(f"{min(len(placements), 20)} exact placements")
                assert best in placements
                if best.price != min(each.price for each in placements):
                    event("a cheaper one has more casts")
                    assert all(_casts_in(each) > most for each in placements if each.price < best.price)
                    continue
            assert best.price <= price_of_present(region, prices)


def _casts_in(placement: Placement) -> int:
    return sum(not value.free for value in placement.cast)


def test_two_smaller_casts_do_not_take_the_place_of_one() -> None:
    """The row is spread only behind its cast, so two casts would move fewer bytes than one of the result."""

    def program(x: Tensor, y: Tensor, low: Tensor) -> Tensor:
        return torch.matmul(torch.cat([y, x[:, :1].expand(-1, 100, -1)], 2), low)

    given = torch.ones(2, 101, 64), torch.ones(2, 100, 64), torch.ones(128, 8).bfloat16()
    ready = prepared(PlaceCasts, program, *given)
    (region,) = _regions(ready)
    assert len(_cheapest(region, Prices()).cast) == 2
    assert _casts_in(cheapest(region, Prices())) == 1
