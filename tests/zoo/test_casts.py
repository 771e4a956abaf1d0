"""No model of the zoo makes more casts converted than under eager autocast, in evaluation and in training."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fxamp
from tests.counts import Counts
from tests.zoo.check import seed_all
from tests.zoo.entry import LIBRARIES, Entry, entries


def _casts(entry: Entry, mode: str) -> tuple[int, int]:
    seed_all(0)
    eager = entry.build().train(mode == "train")
    amp = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16)
    args, kwargs = entry.inputs(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        for _ in range(2):  # the first call of an eager piece is a survey
            amp(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        seed_all(1)
        with Counts(()) as ours:
            amp(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        seed_all(1)
        with torch.autocast("cpu", torch.bfloat16), Counts(()) as theirs:
            eager(*args, **kwargs)
    return ours.casts, theirs.casts


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("library", ["nn", "torchvision", "timm", "transformers"])
def test_a_converted_model_makes_no_more_casts(library: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed")
        for entry in entries(library):
            if entry.fast and mode in entry.modes:
                ours, theirs = _casts(entry, mode)
                assert ours <= theirs, entry.name


def test_more_casts_would_be_counted() -> None:
    with Counts(()) as counts:
        nn.Linear(2, 2).bfloat16()(torch.ones(2, 2).bfloat16())
    assert counts.casts == 3
