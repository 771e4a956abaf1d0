"""A whole training run: float16 on the CPU, loss scaling, overflow, two optimisers, clipping, resuming."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from tests.models import SmallCNN, autocast, equal

STEPS = 200
OVERFLOWS = {3, 4, 50, 51, 52, 120}


class _Training:
    """One side of the comparison: a model, its two optimisers and its scaler."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler, *, converted: bool) -> None:
        self.model, self.scaler, self.converted = model, scaler, converted
        head = list(model.head.parameters())  # type: ignore[union-attr]
        body = [p for p in model.parameters() if all(p is not other for other in head)]
        self.optimizers: list[Any] = [
            torch.optim.SGD(body, lr=0.05, momentum=0.9),
            torch.optim.AdamW(head, lr=0.01),
        ]
        self.call = fxamp.convert(model, device_type="cpu", dtype=torch.float16) if converted else model

    def step(self, images: Tensor, labels: Tensor, *, overflow: bool) -> float:
        with nullcontext() if self.converted else autocast(torch.float16):
            logits = self.call(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if overflow:
            self.optimizers[1].param_groups[0]["params"][0].grad[0, 0] = float("inf")
        self.scaler.unscale_(self.optimizers[0])
        nn.utils.clip_grad_norm_(self.optimizers[0].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": self.scaler.state_dict(),
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])


def _scaler(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=2.0**14, growth_interval=25)


def _assert_same(ours: _Training, theirs: _Training, step: int) -> None:
    assert ours.scaler.get_scale() == theirs.scaler.get_scale(), f"scale at step {step}"
    for (name, one), other in zip(
        ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True
    ):
        assert equal(one, other), f"{name} at step {step}"


def test_two_hundred_steps_are_bit_equal_to_eager_autocast_and_torchs_scaler() -> None:
    torch.manual_seed(0)
    model = SmallCNN()
    theirs = _Training(copy.deepcopy(model), _scaler(torch.amp.GradScaler), converted=False)
    ours = _Training(copy.deepcopy(model), _scaler(fxamp.GradScaler), converted=True)
    data = torch.Generator().manual_seed(1)
    scales = set()
    for step in range(STEPS):
        images = torch.randn(8, 3, 8, 8, generator=data)
        labels = torch.randint(0, 5, (8,), generator=data)
        for side in (theirs, ours):
            torch.manual_seed(step)  # dropout
            side.step(images, labels, overflow=step in OVERFLOWS)
        if step == STEPS // 2:
            ours = _resumed(ours, fxamp.GradScaler, converted=True)
            theirs = _resumed(theirs, torch.amp.GradScaler, converted=False)
        _assert_same(ours, theirs, step)
        scales.add(ours.scaler.get_scale())
    assert len(scales) > 2, "the run saw no overflow and no growth"


def _resumed(side: _Training, kind: type[torch.amp.GradScaler], *, converted: bool) -> _Training:
    """The same training, saved and loaded into new objects."""
    fresh = _Training(SmallCNN(), _scaler(kind), converted=converted)
    fresh.load(side.state())
    return fresh
