"""Two calls of an awkward model, by eager autocast and converted, and the comparison of the two."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fxamp
from tests.awkward import make
from tests.models import autocast, equal, run

__all__ = ["assert_same", "eager_calls", "two_calls"]


def two_calls(
    name: str, dtype: torch.dtype, device_type: str | None, around: Callable[[], Any] = nullcontext
) -> tuple[list[dict[str, Any]], Any]:
    """What two calls of a model give, and what was called.

    Args:
        name: Of the model.
        dtype: Low precision.
        device_type: For which the model is converted; ``None`` runs it under eager autocast.
        around: Makes a context for each call.
    """
    model, args = make(name)
    call = model if device_type is None else fxamp.convert(model, device_type=device_type, dtype=dtype)
    random.seed(3)
    results = []
    for _ in range(2):
        with around():
            region = autocast(dtype) if device_type is None else nullcontext()
            results.append(copy.deepcopy(run(model, call, args, {}, region)))
    return results, call


def eager_calls(
    name: str, dtype: torch.dtype, around: Callable[[], Any] = nullcontext
) -> list[dict[str, Any]]:
    """What two calls give under eager autocast; skips the test where this CPU cannot run them."""
    try:
        return two_calls(name, dtype, None, around)[0]
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"this CPU cannot run it under eager autocast: {error}")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Outputs, written inputs, gradients, buffers and the random state are the same to the bit."""
    for what in ("outputs", "inputs"):
        assert len(found[what]) == len(expected[what])
        assert all(equal(one, other) for one, other in zip(found[what], expected[what], strict=True)), what
    for what in ("gradients", "buffers"):
        assert found[what].keys() == expected[what].keys()
        assert [name for name in found[what] if not equal(found[what][name], expected[what][name])] == [], (
            what
        )
    assert torch.equal(found["random"], expected["random"]), "the random state differs"
