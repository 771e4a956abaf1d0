"""One small model of each family of timm: a module of timm and the beginning of a name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

_FAST = {"test_resnet"}

# The smallest variant of each module of timm and beginning of a name, under 36 million weights; by the side
# of the image, the smallest of 64, 96, 128, ... that it takes, and by whether it must be made for that side.
# fmt: off
_SMALL: dict[tuple[int, bool], tuple[str, ...]] = {
    (64, False): (
        "caformer_s18",
        "convformer_s18",
        "convmixer_768_32",
        "convnext_atto_rms",
        "convnextv2_atto",
        "cpubone_nano",
        "crossvit_tiny_240",
        "cs3darknet_focus_s",
        "csatv2",
        "cspdarknet53",
        "cspnext_tiny",
        "cspresnet50",
        "cspresnext50",
        "darknet17",
        "davit_tiny",
        "densenet121",
        "densenetblur121d",
        "dla46x_c",
        "dpn48b",
        "eca_nfnet_l0",
        "eca_resnext26ts",
        "eca_vovnet39b",
        "ecaresnet26t",
        "ecaresnetlight",
        "ecaresnext26t_32x4d",
        "edgenext_xx_small",
        "efficientnet_lite0",
        "efficientnetv2_rw_t",
        "efficientvim_m1",
        "efficientvit_b0",
        "efficientvit_m0",
        "ese_vovnet19b_slim_dw",
        "fasternet_s",
        "fastvit_t12",
        "fbnetc_100",
        "fbnetv3_b",
        "focalnet_tiny_srf",
        "gc_efficientnetv2_rw_t",
        "gcresnet33ts",
        "gcresnext26ts",
        "gernet_s",
        "ghostnet_050",
        "ghostnetv3_050",
        "hardcorenas_b",
        "hgnet_tiny",
        "hgnetv2_b0",
        "hieradet_small",
        "hrnet_w18_small",
        "iformer_t",
        "inception_next_atto",
        "lambda_resnet26t",
        "lcnet_035",
        "lcnetv2_small",
        "legacy_seresnet18",
        "legacy_xception",
        "lowformer_b0",
        "mambaout_femto",
        "mixnet_s",
        "mnasnet_small",
        "mobilenet_edgetpu_v2_xs",
        "mobilenetv2_035",
        "mobilenetv3_small_050",
        "mobileone_s0",
        "mobilevit_xxs",
        "mobilevitv2_050",
        "mvitv2_tiny",
        "nextvit_small",
        "nf_regnet_b0",
        "nfnet_l0",
        "poolformer_s12",
        "poolformerv2_s12",
        "pvt_v2_b0",
        "rdnet_tiny",
        "regnetv_040",
        "regnetx_002",
        "regnety_002",
        "regnetz_005",
        "regnetz_b16",
        "repghostnet_050",
        "repvgg_b0",
        "repvit_m0_9",
        "res2net50_26w_4s",
        "resnest26d",
        "resnet18",
        "resnet32ts",
        "resnetaa34d",
        "resnetblur18",
        "resnetrs50",
        "resnetv2_18",
        "resnext26ts",
        "resnext50_32x4d",
        "rexnet_100",
        "rexnetr_100",
        "sam2_hiera_tiny",
        "sedarknet21",
        "selecsls42",
        "semnasnet_050",
        "sequencer2d_s",
        "seresnet18",
        "seresnet33ts",
        "seresnetaa50d",
        "seresnext26t_32x4d",
        "seresnext26ts",
        "shvit_s1",
        "skresnet18",
        "skresnext50_32x4d",
        "spnasnet_100",
        "starnet_s050",
        "swiftformer_xs",
        "test_byobnet",
        "test_convnext",
        "test_efficientnet",
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
        "test_vit",
        "tf_efficientnet_lite0",
        "tf_mobilenetv3_small_075",
        "tiny_vit_5m_224",
        "tinynet_e",
        "tresnet_m",
        "twins_svt_small",
        "vovnet39a",
        "xception41p",
        "xcit_nano_12_p8_224",
    ),
    (64, True): (
        "botnet26t_256",
        "cait_xxs24_224",
        "coat_tiny",
        "coatnet_pico_rw_224",
        "coatnext_nano_rw_224",
        "convit_tiny",
        "deit_tiny_patch16_224",
        "eca_botnext26ts_256",
        "efficientformerv2_s0",
        "eva02_tiny_patch14_224",
        "flexivit_small",
        "gcvit_xxtiny",
        "gmixer_12_224",
        "gmlp_ti16_224",
        "hiera_tiny_224",
        "levit_128s",
        "maxvit_pico_rw_256",
        "maxxvit_rmlp_nano_rw_256",
        "maxxvitv2_nano_rw_256",
        "mixer_s16_224",
        "nest_tiny",
        "pit_xs_224",
        "resmlp_12_224",
        "sebotnet33ts_256",
        "swin_tiny_patch4_window7_224",
        "swinv2_cr_tiny_224",
        "swinv2_tiny_window16_256",
        "test_coatnet",
        "test_vit_relpos",
        "tnt_s_legacy_patch16_224",
        "visformer_tiny",
        "vit_pe_spatial_tiny_patch16_512",
        "vit_small_patch8_224",
        "vit_srelpos_small_patch16_224",
        "vit_tiny_r_s16_p8_224",
        "vitamin_small_224",
    ),
    (96, False): ("inception_v3",),
    (128, True): (
        "halo2botnet50ts_256",
        "lamhalobotnet50ts_256",
    ),
    (224, False): (
        "efficientformer_l1",
        "haloregnetz_b",
    ),
    (256, False): (
        "bat_resnext26ts",
        "halonet26t",
        "sehalonet33ts",
    ),
}
# fmt: on

# Families without a small variant, cut in depth: side and options.
_CUT: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "beitv2_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "beit3_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "deepseek_vit_412m": (56, {"img_size": 56, "depth": 2, "embed_dim": 128, "num_heads": 2}),
    "gemma4_vit_167m": (96, {"depth": 2}),
    "qwen3_vit_88m": (64, {"depth": 2}),
    "naflexvit_base_patch16_parfac_gap": (64, {"depth": 2}),
    "aimv2_large_patch14_224": (56, {"img_size": 56, "depth": 2, "embed_dim": 128, "num_heads": 2}),
    "eva_large_patch14_196": (56, {"img_size": 56, "depth": 2, "embed_dim": 128, "num_heads": 2}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "wide_resnet50_2": (64, {"layers": (1, 1, 1, 1)}),
    "seresnextaa101d_32x8d": (64, {"layers": (1, 1, 1, 1)}),
}


def entries() -> tuple[Entry, ...]:
    """The list."""
    import timm  # noqa: PLC0415, F401  may be missing

    small = [
        _entry(name, side, {"img_size": side} if told else {})
        for (side, told), names in _SMALL.items()
        for name in names
    ]
    return (*small, *(_entry(name, side, options) for name, (side, options) in _CUT.items()))


def _entry(name: str, side: int, options: dict[str, Any]) -> Entry:
    def inputs(batch: int) -> Inputs:
        return (torch.randn(batch, 3, side, side),), {}

    build = partial(_build, name, **options)
    return Entry(name, "timm", build, lambda _: inputs(2), lambda _: inputs(4), fast=name in _FAST)


def _build(name: str, **options: Any) -> nn.Module:
    import timm  # noqa: PLC0415

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model
