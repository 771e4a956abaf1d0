"""Every architecture of segmentation_models_pytorch, with small encoders."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

_SMALL = "timm-mobilenetv3_small_minimal_100"
# architecture, encoder, further options
_LISTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Unet", _SMALL, {}),
    ("Unet", _SMALL, {"decoder_attention_type": "scse"}),
    ("UnetPlusPlus", _SMALL, {}),
    ("MAnet", _SMALL, {"decoder_channels": (64, 32, 32, 16, 16)}),
    ("Linknet", _SMALL, {}),
    ("FPN", _SMALL, {}),
    ("FPN", "efficientnet-b0", {}),
    ("PSPNet", _SMALL, {}),
    ("PAN", _SMALL, {}),
    ("DeepLabV3", _SMALL, {"decoder_channels": 32}),
    ("DeepLabV3Plus", "mobilenet_v2", {}),
    ("UPerNet", _SMALL, {"decoder_channels": 32}),
    ("Segformer", "mit_b0", {}),
    ("Unet", _SMALL, {"aux_params": {"classes": 3}}),
    (
        "DPT",
        "tu-test_vit",
        {"decoder_intermediate_channels": (16, 16, 16, 16), "decoder_fusion_channels": 16},
    ),
)


def entries() -> tuple[Entry, ...]:
    """The list."""
    import segmentation_models_pytorch  # noqa: PLC0415, F401  may be missing

    return tuple(_entry(*listed) for listed in _LISTED)


def _entry(architecture: str, encoder: str, options: dict[str, Any]) -> Entry:
    def inputs(batch: int) -> Inputs:
        side = {"DPT": 160, "PAN": 128}.get(architecture, 64)
        return (torch.randn(batch, 3, side, side),), {}

    name = "-".join([architecture, encoder, *options])
    build = partial(_build, architecture, encoder, options)
    return Entry(name, "smp", build, lambda _: inputs(2), lambda _: inputs(4))


def _build(architecture: str, encoder: str, options: dict[str, Any]) -> nn.Module:
    import segmentation_models_pytorch as smp  # noqa: PLC0415

    kind = getattr(smp, architecture)
    model: nn.Module = kind(encoder_name=encoder, encoder_weights=None, classes=3, **options)
    return model
