"""One converted model, many threads: the casts are in the graph, so no thread's state matters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.models import SmallCNN, SmallTransformer, autocast, equal

THREADS = 8
CALLS = 6


def _ambient(index: int) -> torch.autocast:
    """Another surrounding state for each thread: none, switched off, float16, bfloat16."""
    states = ((torch.bfloat16, False), (torch.float16, True), (torch.bfloat16, True))
    dtype, enabled = states[index % len(states)]
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def _together(work: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """What each of the threads gives, all started at the same moment."""
    barrier = threading.Barrier(THREADS)

    def start(index: int) -> list[Tensor]:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


@pytest.mark.parametrize("captured_before", [True, False])
def test_eight_threads_get_what_one_gets(captured_before: bool) -> None:
    model = SmallCNN().eval()
    inputs = [torch.randn(2 + index % 3, 3, 8, 8) for index in range(CALLS)]
    with torch.no_grad(), autocast(torch.bfloat16):
        expected = [model(x) for x in inputs]
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    if captured_before:
        with torch.no_grad():
            amp(inputs[0])

    def work(index: int) -> list[Tensor]:
        with torch.no_grad():
            if index % 4 == 0:
                return [amp(x) for x in inputs]
            with _ambient(index):
                return [amp(x) for x in inputs]

    for found in _together(work):
        assert all(equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_taken_in_eight_threads_are_those_of_one() -> None:
    model = SmallTransformer().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    tokens = [torch.randint(0, 30, (2, 5)) for _ in range(3)]
    parameters = list(model.parameters())

    def gradients(index: int) -> list[Tensor]:
        with _ambient(index):
            losses = [amp(batch)["logits"].float().square().mean() for batch in tokens]
        return [grad for loss in losses for grad in torch.autograd.grad(loss, parameters)]

    with autocast(torch.bfloat16):
        losses = [model(batch)["logits"] for batch in tokens]
    expected = [
        grad for out in losses for grad in torch.autograd.grad(out.float().square().mean(), parameters)
    ]
    for found in _together(gradients):
        assert all(equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_model_with_an_eager_piece_is_right_in_eight_threads() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.g(self.f(x))
            return h if h.sum() > 0 else -self.f(h)

    model = Gate().eval()
    inputs = [torch.randn(3, 4) for _ in range(CALLS)]
    with torch.no_grad(), autocast(torch.bfloat16):
        expected = [model(x) for x in inputs]
    amp = fxamp.convert(model, dtype=torch.bfloat16)

    def work(index: int) -> list[Tensor]:
        with torch.no_grad(), _ambient(index):
            return [amp(x) for x in inputs]

    for found in _together(work):
        assert all(equal(one, other) for one, other in zip(found, expected, strict=True))


def test_source_and_converted_model_run_side_by_side() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        plain = model(x)
        with autocast(torch.bfloat16):
            low = model(x)

    def work(index: int) -> list[Tensor]:
        with torch.no_grad():
            return [(amp if index % 2 else model)(x) for _ in range(CALLS)]

    for index, found in enumerate(_together(work)):
        assert all(equal(out, low if index % 2 else plain) for out in found)
