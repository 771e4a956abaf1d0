"""Every model of torchvision, but two of over a gigabyte of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

# Side of the input image where the smallest that most models take, 32, is too small.  All are as small as
# can be: without the instructions for bfloat16 a CPU is a hundred times slower in it than in float32.
_SIDES = {"inception_v3": 96, "maxvit_t": 224, "mnasnet": 64}
_SIDES |= dict.fromkeys(("alexnet", "squeezenet", "googlenet", "vit", "deeplab", "fcn", "lraspp"), 64)
# Over a gigabyte of weights each; their smaller siblings have the same modules.
_TOO_LARGE = {"vit_h_14", "regnet_y_128gf"}
_FAST = {"squeezenet1_1"}
# Clips (frames, side) of video models.
_CLIPS = {"mvit": (16, 224), "s3d": (16, 64)}


def entries() -> tuple[Entry, ...]:
    """The list."""
    from torchvision import models  # noqa: PLC0415  may be missing

    kinds: dict[Any, Callable[[str], Entry]] = {
        models: _image,
        models.segmentation: _image,
        models.detection: _detection,
        models.video: _video,
        models.optical_flow: _flow,
    }
    return tuple(
        make(name)
        for module, make in kinds.items()
        for name in models.list_models(module=module)
        if name not in _TOO_LARGE
    )


def _build(name: str, **options: Any) -> nn.Module:
    from torchvision import models  # noqa: PLC0415

    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


def _side(name: str) -> int:
    return next((side for prefix, side in _SIDES.items() if name.startswith(prefix)), 64)


def _entry(name: str, inputs: Callable[[int, bool], Inputs], **options: Any) -> Entry:
    """Inputs are made for a batch size; other sizes are twice the batch."""
    return Entry(
        name,
        "torchvision",
        partial(_build, name, **options),
        partial(inputs, 2),
        partial(inputs, 4),
        fast=name in _FAST,
    )


def _image(name: str) -> Entry:
    from torchvision import models  # noqa: PLC0415

    segments = name in models.list_models(module=models.segmentation)
    options: dict[str, Any] = {"weights_backbone": None} if segments else {}
    side = _side(name)
    if name.startswith("vit"):
        options["image_size"] = side
    if name == "inception_v3":
        options["aux_logits"] = False  # the auxiliary head takes 299 pixels
    return _entry(name, lambda batch, training: ((torch.randn(batch, 3, side, side),), {}), **options)


def _video(name: str) -> Entry:
    frames, side = next((clip for prefix, clip in _CLIPS.items() if name.startswith(prefix)), (8, 32))
    return _entry(name, lambda batch, training: ((torch.randn(batch, 3, frames, side, side),), {}))


def _flow(name: str) -> Entry:
    def inputs(batch: int, training: bool) -> Inputs:
        images = torch.rand(2, batch, 3, 128, 128) * 2 - 1
        return (images[0], images[1]), {"num_flow_updates": 2}

    return _entry(name, inputs)


def _detection(name: str) -> Entry:
    def inputs(batch: int, training: bool) -> Inputs:
        images = [torch.rand(3, 64 + 4 * index, 80) for index in range(batch)]
        if not training:
            return (images,), {}
        boxes = torch.tensor([[4.0, 8.0, 40.0, 60.0], [30.0, 20.0, 70.0, 60.0]])
        target: dict[str, Any] = {"boxes": boxes, "labels": torch.tensor([1, 2])}
        if name.startswith("keypoint"):
            target["labels"] = torch.tensor([1, 1])
            target["keypoints"] = torch.cat([torch.rand(2, 17, 2) * 40 + 10, torch.ones(2, 17, 1)], 2)
        targets = [dict(target) for _ in images]
        if name.startswith("mask"):
            for image, each in zip(images, targets, strict=True):
                each["masks"] = (torch.rand(2, *image.shape[1:]) > 0.5).to(torch.uint8)
        return (images, targets), {}

    sizes = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    return _entry(name, inputs, weights_backbone=None, **sizes)
