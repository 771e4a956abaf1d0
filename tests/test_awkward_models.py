"""Models that do what capture finds hard give what eager autocast gives: captured, or honestly eager."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.awkward import MODELS
from tests.awkward_calls import assert_same, eager_calls, two_calls

MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def _check(name: str, dtype: torch.dtype, mode: str) -> None:
    with MODES[mode]():
        expected = eager_calls(name, dtype)
        found, amp = two_calls(name, dtype, "cpu")
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    if mode == "grad":
        assert (amp.eager_modules == ()) == MODELS[name][1], [str(piece) for piece in amp.report().eager]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MODELS))
def test_an_awkward_model_is_eager_autocast(name: str) -> None:
    _check(name, torch.bfloat16, "grad")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(MODELS))
def test_an_awkward_model_is_eager_autocast_in_every_mode(name: str, dtype: torch.dtype, mode: str) -> None:
    _check(name, dtype, mode)
