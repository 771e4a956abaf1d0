"""A copied tree has the given tensors in the place of others, wherever its modules held them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxamp.errors import ArgumentError
from fxamp.runtime.copy_tree import copy_tree


def test_a_tensor_is_replaced_in_parameters_lists_and_dicts_and_stays_tied() -> None:
    model: Any = nn.LSTM(2, 3)
    model.table = {"first": model.weight_ih_l0}
    other = nn.Parameter(torch.zeros(12, 2))
    copied: Any = copy_tree(model, {id(model.weight_ih_l0): other})
    assert copied.weight_ih_l0 is copied._flat_weights[0] is copied.table["first"] is other
    assert copied.weight_hh_l0 is not model.weight_hh_l0
    assert model._flat_weights[0] is model.weight_ih_l0 is not other


def test_a_tensor_with_a_history_is_copied_by_its_values() -> None:
    model: Any = nn.Linear(2, 2)
    model.latest = model.weight * 2
    copied: Any = copy_tree(model, {})
    assert torch.equal(copied.latest, model.latest)
    assert copied.latest.grad_fn is None


def test_what_cannot_be_copied_is_told() -> None:
    model: Any = nn.Linear(2, 2)
    model.rows = iter(range(3)).__iter__
    copy_tree(model, {})
    model.rows = (row for row in range(3))
    with pytest.raises(
        ArgumentError, match=r"Linear cannot be copied: TypeError.*\n  copy.deepcopy\(model\)"
    ):
        copy_tree(model, {})
