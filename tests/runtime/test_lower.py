"""Flat code: a line an operator, builtins called directly, values dropped after their last use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph

from fxamp.capture.recording_mode import RecordingMode
from fxamp.ir.regions import Region
from fxamp.passes.verify import Verify
from fxamp.runtime.lower import FlatCode, lower
from tests.passes.checks import BF16, prepared


def _lowered(
    function: Callable[..., Any], *args: Any, keep_cast: Any = None, region: Region = BF16
) -> tuple[FlatCode, list[Tensor]]:
    """The flat code of ``function(*args)`` after the whole pipeline, and the tensors that it reads."""
    ready = prepared(Verify, function, *args, region=region)
    ready.step(ready.module)
    tensors = [getattr(ready.module, node.name) for node in ready.module.graph.nodes if node.op == "get_attr"]
    return lower(ready.module.graph, keep_cast), tensors


def _check(text: str, function: Callable[..., Any], *args: Tensor, region: Region = BF16) -> None:
    code, tensors = _lowered(function, *args, region=region)
    assert code.text.strip() == dedent(text).strip()
    with region.context():
        expected = function(*args)
    (result,) = code.run(args, tensors)
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype


def test_a_line_is_an_operator_and_values_are_dropped_after_their_last_use() -> None:
    _check(
        """
        def run(inputs, tensors):
            (x,) = inputs
            x_bf16 = x.bfloat16()
            del x
            mm = mm_(x_bf16, x_bf16)
            del x_bf16
            exp = exp_(mm)
            del mm
            add = add_(exp, 1)
            del exp
            return (add,)
        """,
        lambda x: torch.mm(x, x).exp() + 1,
        torch.ones(2, 2),
    )


def test_operators_on_sizes_are_python() -> None:
    code, _ = _lowered(lambda x: x.new_zeros(x.shape[0] * 2 + 1), torch.ones(3))
    assert code.run([torch.ones(3)], [])[0].shape == (7,)


def test_special_numbers_and_lists_are_written_or_named() -> None:
    def program(x: Tensor) -> Tensor:
        return F.pad(x, [1, 1], value=float("-inf")).masked_fill(torch.isnan(x.sum()), 2.5)

    code, tensors = _lowered(program, torch.ones(2))
    assert torch.equal(code.run([torch.ones(2)], tensors)[0], program(torch.ones(2)))
    assert "[1, 1]" in code.text
    assert "2.5" in code.text


def test_names_that_python_or_the_function_uses_are_not_taken() -> None:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("lambda", "inputs", "run", "tensors", "grad")]
    added = inputs[0]
    for other in inputs[1:]:
        added = graph.call_function(torch.ops.aten.add.Tensor, (added, other))
    graph.output((added,))
    for node in graph.nodes:
        node.meta["fact"] = ()
    numbers = [torch.tensor(float(2**power)) for power in range(5)]
    assert lower(graph).run(numbers, [])[0] == 31


def test_the_gradient_mode_is_put_back_after_an_error() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([x, y])

    code, tensors = _lowered(program, torch.ones(2, 2), torch.ones(2, 2))
    assert not code.run([torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)], tensors)[0].requires_grad
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        code.run([torch.ones(2, 2), torch.ones(3, 3)], tensors)
    assert torch.is_grad_enabled()


def test_casts_that_eager_keeps_can_be_asked_for_elsewhere() -> None:
    asked: list[torch.dtype] = []

    def keep_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        asked.append(dtype)
        return tensor.to(dtype)

    model = nn.Linear(2, 2)
    code, tensors = _lowered(model, torch.ones(1, 2), keep_cast=keep_cast)
    assert "keep_cast(weight, bfloat16)" in code.text
    code.run([torch.ones(1, 2)], tensors)
    assert asked == [torch.bfloat16] * 2


def test_values_are_freed_while_the_code_runs() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def remember(x: Tensor) -> Tensor:
        y = x * 2
        alive.append(weakref.ref(y))
        return y

    def count(x: Tensor) -> Tensor:
        gc.collect()
        assert alive[0]() is None
        return x

    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(remember, (x,))
    second = graph.call_function(torch.ops.aten.exp.default, (first,))
    graph.output((graph.call_function(count, (second,)),))
    for node in graph.nodes:
        node.meta["fact"] = ()
    lower(graph).run([torch.ones(2)], [])
    assert len(alive) == 1


# --- picks by tensors -----------------------------------------------------------------------------------

_PICKS: dict[str, tuple[Callable[..., Any], str]] = {
    "rows": (lambda x, i: x[i], "index = x[i]"),
    "pairs": (lambda x, i: x[i, i], "index = x[i, i]"),
    "another's rows": (lambda x, i: x.t()[i.to(torch.int32)], "index = t[to]"),
    "columns": (lambda x, i: x[:, i], "index = index_Tensor(x, [None, i])"),
    "a number that a tensor holds": (
        lambda x, i: torch.ops.aten.index.Tensor(x, [i[0]]),
        "index = index_Tensor(x, [select])",
    ),
}


@pytest.mark.parametrize(("picks", "line"), _PICKS.values(), ids=_PICKS)
def test_picks_by_tensors_of_some_dimension_are_pythons_indexing(picks: Any, line: str) -> None:
    x, i = torch.arange(12.0).view(3, 4), torch.tensor([1, 0])
    code, tensors = _lowered(picks, x, i)
    assert line in code.text
    (found,) = code.run((x, i), tensors)
    assert torch.equal(found, picks(x, i))


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    picked=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from([torch.int64, torch.int32, torch.bool]), min_size=3, max_size=3),
)
def test_pythons_indexing_reaches_the_operator_with_the_same_indices(
    shape: list[int], picked: list[list[int]], kinds: list[torch.dtype]
) -> None:
    x = torch.zeros(shape)
    indices = [torch.zeros(size, dtype=kind) for size, kind in zip(picked, kinds, strict=False)]
    reached: list[Any] = []

    def stop(func: Any, args: Any, kwargs: Any) -> Any:
        reached.append(
            (func, args[0] is x, [index is given for index, given in zip(args[1], indices, strict=True)])
        )
        raise KeyError

    with enable_python_dispatcher(), RecordingMode(stop), pytest.raises((KeyError, IndexError)):
        x[tuple(indices)]
    assert reached in ([], [(torch.ops.aten.index.Tensor, True, [True] * len(indices))])


def test_code_that_consumes_its_inputs_holds_no_value_after_its_last_use() -> None:
    ready = prepared(Verify, lambda x: x.exp() + 1, torch.ones(2))
    code = lower(ready.module.graph, consumes=True)
    given = [torch.ones(2)]
    alive = weakref.ref(given[0])
    (found,) = code.run(given, [])
    assert "inputs.clear()" in code.text
    assert given == []
    assert alive() is None
    assert torch.equal(found, torch.ones(2).exp() + 1)
