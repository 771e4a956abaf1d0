"""One small model of each family of timm: a module of timm and the beginning of a name."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

_FAST = {"test_resnet", "test_convnext"}
# Of no family the smallest, but small enough and quick; the others of the family are larger than the limit.
_SIDE = 64
_MOST_PARAMETERS = 30e6

# name: side of the image, for those that take no smaller one; found by trying 64, 96, 128, 224, ...
_LISTED: dict[str, int] = {}


def entries() -> tuple[Entry, ...]:
    """The list."""
    import timm  # noqa: PLC0415, F401  may be missing

    return tuple(_entry(name, side) for name, side in _LISTED.items())


def _entry(name: str, side: int) -> Entry:
    def inputs(batch: int) -> Inputs:
        return (torch.randn(batch, 3, side, side),), {}

    return Entry(name, "timm", partial(_build, name, side), lambda _: inputs(2), lambda _: inputs(4))


def _build(name: str, side: int, **options: Any) -> nn.Module:
    import timm  # noqa: PLC0415

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model
