"""Arguments and results are taken apart and put together again."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxamp.capture.structure import flatten, unflatten
from fxamp.errors import CaptureError


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    """A plain data class."""

    content: Any
    label: str = "box"


@dataclasses.dataclass(frozen=True)
class Sealed:
    """A frozen data class with a field that ``__init__`` does not take."""

    content: Any
    weight: Any = dataclasses.field(default=None, init=False)


_constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from((0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, 0.1)),
    st.sampled_from((0j, -0j, complex(math.nan, 1))),
    st.text(max_size=2),
    st.sampled_from((torch.float16, torch.device("cpu"), torch.strided, ..., b"x")),
    st.builds(torch.Size, st.lists(st.integers(0, 3), max_size=2)),
)
_tensors = st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    keys = st.one_of(st.text(max_size=1), st.integers(0, 1), st.booleans())
    return st.one_of(
        items,
        items.map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=2).map(lambda entries: defaultdict(list, entries)),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, st.text(max_size=1)),
        st.builds(Sealed, inner),
    )


values = st.recursive(_constants | _tensors, _containers, max_leaves=12)


def _rebuilt(value: Any) -> Any:
    """An equal value in new containers, with new numbers, around the same tensors."""
    if isinstance(value, Tensor):
        return value
    if type(value) is float:
        return float(repr(value))
    if isinstance(value, Pair):
        return Pair(*map(_rebuilt, value))
    if type(value) in (list, tuple):
        return type(value)(map(_rebuilt, value))
    if isinstance(value, dict):
        copied = value.copy()
        copied.update({key: _rebuilt(item) for key, item in value.items()})
        return copied
    if isinstance(value, (Box, Sealed)):
        rebuilt: Any = object.__new__(type(value))
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, _rebuilt(getattr(value, field.name)))
        return rebuilt
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are of the same classes throughout, and equal to the sign of a zero."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same([*one.items()], [*other.items()])
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


@given(values)
def test_putting_together_undoes_taking_apart(value: Any) -> None:
    spec, leaves = flatten(value)
    assert _same(unflatten(spec, leaves), value)


@given(values)
def test_two_calls_that_look_alike_have_the_same_structure(value: Any) -> None:
    spec, leaves = flatten(value)
    again, _ = flatten(_rebuilt(value))
    assert spec == again
    assert hash(spec) == hash(again)
    assert flatten(unflatten(spec, leaves))[0] == spec


@given(values, values)
def test_calls_that_differ_in_more_than_their_tensors_have_different_structures(one: Any, other: Any) -> None:
    if flatten(one)[0] == flatten(other)[0]:
        tensors = flatten(one)[1]
        assert _same(unflatten(flatten(other)[0], tensors), one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({1: 2}, {True: 2}),
        ({"a": 1}, OrderedDict(a=1)),
        (0j, -0j),
    ],
)
def test_equal_constants_may_still_be_different(one: Any, other: Any) -> None:
    assert flatten(one)[0] != flatten(other)[0]


def test_tensors_come_in_order() -> None:
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    _, leaves = flatten(({"b": first, "a": [second]}, Pair(third, first)))
    assert [id(leaf) for leaf in leaves] == [id(first), id(second), id(third), id(first)]


def test_an_object_without_tensors_is_itself_and_like_no_other() -> None:
    one, other = object(), object()
    spec, leaves = flatten([one])
    assert unflatten(spec, leaves) == [one]
    assert flatten([one])[0] == spec
    assert flatten([other])[0] != spec


def test_an_object_that_is_no_more_than_its_attributes_is_taken_apart() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys, self.length = [torch.ones(1)], 3

    cache = Cache()
    spec, leaves = flatten([cache, cache])
    assert len(leaves) == 1
    one, other = unflatten(spec, leaves)
    assert type(one) is Cache
    assert one is other
    assert one.keys[0] is cache.keys[0]
    assert one.length == 3
    cache.length = 4
    assert flatten([cache, cache])[0] != spec


def test_an_object_that_contains_itself_is_taken_apart() -> None:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    again = unflatten(*flatten(value))
    assert again[1] is again


def test_an_object_of_an_unknown_class_that_holds_tensors_is_refused_with_a_way_out() -> None:
    class Holder:
        __slots__ = ("__dict__",)

        def __init__(self) -> None:
            self.cache = {"keys": [torch.ones(1)]}

    with pytest.raises(CaptureError, match=r"class .*Holder that holds tensors\n  register it:"):
        flatten([Holder()])


def test_a_data_class_keeps_the_attributes_that_are_no_fields() -> None:
    box = Box(torch.ones(1))
    box.__dict__["extra"] = torch.ones(2)
    spec, leaves = flatten(box)
    assert len(leaves) == 2
    assert unflatten(spec, leaves).extra is box.__dict__["extra"]


def test_results_of_torch_keep_their_class() -> None:
    result = torch.ones(2, 2).max(dim=0)
    spec, leaves = flatten(result)
    assert type(unflatten(spec, leaves)) is type(result)
