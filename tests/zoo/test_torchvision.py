"""Every classification and segmentation model of torchvision is eager autocast, whole, in both modes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import assert_like_eager

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")

FAST = ("resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "lraspp_mobilenet_v3_large")
# Side of the input image where the smallest that most models take, 64, is too small.
SIDES = {
    "inception_v3": 299,
    "maxvit_t": 224,
    "alexnet": 96,
    "densenet": 96,
    "squeezenet": 96,
    "vgg": 96,
    "mnasnet": 96,
}
SIDES |= {"vit": 224}
# Over a gigabyte of weights each; their smaller siblings have the same modules.
TOO_LARGE = {"vit_h_14", "regnet_y_128gf"}


def _names() -> list[str]:
    models = torchvision.models
    names = models.list_models(module=models) + models.list_models(module=models.segmentation)
    return [name for name in names if name not in TOO_LARGE]


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights_backbone": None} if name in _segmentation() else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _segmentation() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models.segmentation))


def _side(name: str) -> int:
    return next((side for prefix, side in SIDES.items() if name.startswith(prefix)), 64)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    gc.collect()


def _check(name: str, *, training: bool) -> None:
    images = torch.randn(2, 3, _side(name), _side(name))
    with torch.set_grad_enabled(training):
        assert_like_eager(_model(name).train(training), (images,))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", FAST)
def test_a_model_is_eager_autocast(name: str, training: bool) -> None:
    _check(name, training=training)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", [name for name in _names() if name not in FAST])
def test_every_model_is_eager_autocast(name: str, training: bool) -> None:
    _check(name, training=training)
