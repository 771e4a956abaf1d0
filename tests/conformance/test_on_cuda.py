"""On a real GPU: what fake tensors cannot run, cuDNN's recurrent networks above all.  ``pytest -m cuda``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxamp
from tests.models import SmallCNN, SmallTransformer, equal

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

MODELS: dict[str, tuple[Any, Any]] = {
    "RNN": (lambda: nn.RNN(8, 16), lambda: torch.randn(5, 2, 8)),
    "LSTM": (lambda: nn.LSTM(8, 16, 2, bidirectional=True), lambda: torch.randn(5, 2, 8)),
    "GRU": (lambda: nn.GRU(8, 16, batch_first=True), lambda: torch.randn(2, 5, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 16), lambda: torch.randn(2, 8)),
    "CNN": (SmallCNN, lambda: torch.randn(2, 3, 8, 8)),
    "transformer": (SmallTransformer, lambda: torch.randint(0, 30, (2, 5))),
}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_converted_model_is_eager_cuda_autocast(name: str, training: bool, low: torch.dtype) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    eager = make().to("cuda").train(training)
    model, x = copy.deepcopy(eager), inputs().to("cuda")
    with torch.set_grad_enabled(training):
        torch.manual_seed(1)
        with torch.autocast("cuda", low):
            wanted = tensors(eager(x))
        torch.manual_seed(1)
        found = tensors(fxamp.convert(model, dtype=low)(x))
    assert all(equal(one, other) for one, other in zip(found, wanted, strict=True))
    if training:
        sum(tensor.float().sum() for tensor in wanted).backward()  # type: ignore[union-attr]
        sum(tensor.float().sum() for tensor in found).backward()  # type: ignore[union-attr]
        pairs = zip(model.named_parameters(), eager.parameters(), strict=True)
        assert [key for (key, one), other in pairs if not equal(one.grad, other.grad)] == []


def tensors(result: Any) -> list[Tensor]:
    """The tensors in *result*."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
