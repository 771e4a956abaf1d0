"""Models that do what capture finds hard give what eager autocast gives: captured, or honestly eager."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fxamp
from tests.awkward import MODELS, make
from tests.models import autocast, equal, run

MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def _two_calls(name: str, dtype: torch.dtype, *, converted: bool) -> tuple[list[dict[str, Any]], Any]:
    model, args = make(name)
    call = fxamp.convert(model, device_type="cpu", dtype=dtype) if converted else model
    random.seed(3)
    results = []
    for _ in range(2):
        result = run(model, call, args, {}, nullcontext() if converted else autocast(dtype))
        results.append(copy.deepcopy(result))
    return results, call


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("outputs", "inputs"):
        assert len(found[what]) == len(expected[what])
        assert all(equal(one, other) for one, other in zip(found[what], expected[what], strict=True)), what
    for what in ("gradients", "buffers"):
        assert found[what].keys() == expected[what].keys()
        assert [name for name in found[what] if not equal(found[what][name], expected[what][name])] == [], (
            what
        )
    assert torch.equal(found["random"], expected["random"]), "the random state differs"


def _check(name: str, dtype: torch.dtype, mode: str) -> None:
    with MODES[mode]():
        try:
            expected, _ = _two_calls(name, dtype, converted=False)
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            pytest.skip(f"this CPU cannot run it under eager autocast: {error}")
        found, amp = _two_calls(name, dtype, converted=True)
    for one, other in zip(found, expected, strict=True):
        _assert_same(one, other)
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
