"""No model of the zoo makes more casts converted than under eager autocast, and none of weights frozen."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.counts import Counts
from tests.zoo.casts import CastCounts, count_casts
from tests.zoo.entry import LIBRARIES, entries


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("library", ["nn", "torchvision", "timm", "transformers"])
def test_a_converted_model_makes_no_more_casts(library: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed")
        for entry in entries(library):
            if entry.fast and mode in entry.modes:
                counts = CastCounts(library, entry.name, mode)
                count_casts(entry, mode, counts)
                assert not counts.excess, entry.name


def test_more_casts_would_be_counted() -> None:
    with Counts(()) as counts:
        nn.Linear(2, 2).bfloat16()(torch.ones(2, 2).bfloat16())
    assert counts.casts == 3


def test_each_kind_of_excess_is_told() -> None:
    many = CastCounts(
        "nn", "linear", "eval", eager=3, eager_weights=2, converted=4, frozen=2, frozen_weights=1
    )
    assert many.excess == (
        "converted 4, eager 3",
        "frozen casts 1 weights",
    )
    moved = CastCounts("nn", "linear", "eval", eager=3, eager_weights=2, converted=3, frozen=2)
    assert moved.excess == ("frozen 2 beside weights, eager 1",)
    few = CastCounts("nn", "linear", "eval", eager=3, eager_weights=2, converted=3, frozen=1)
    assert few.excess == ()
