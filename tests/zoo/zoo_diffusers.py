"""Networks of diffusers with tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import Entry

__all__ = ["entries"]

Make = Callable[[int, int], dict[str, Any]]  # keyword arguments for a batch and a length of text


def _latent(batch: int, channels: int = 4, side: int = 8) -> Tensor:
    return torch.randn(batch, channels, side, side)


def _steps(batch: int) -> Tensor:
    return torch.randint(0, 1000, (batch,))


def _image(channels: int, side: int) -> Make:
    return lambda batch, length: {"sample": _latent(batch, channels, side)}


def _unconditional(batch: int, length: int) -> dict[str, Any]:
    return {"sample": _latent(batch, 3, 16), "timestep": _steps(batch)}


def _conditional(batch: int, length: int) -> dict[str, Any]:
    return {
        "sample": _latent(batch),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
    }


def _control(batch: int, length: int) -> dict[str, Any]:
    return {**_conditional(batch, length), "controlnet_cond": torch.randn(batch, 3, 16, 16)}


def _xl(batch: int, length: int) -> dict[str, Any]:
    added = {"text_embeds": torch.randn(batch, 16), "time_ids": torch.randn(batch, 6)}
    return {**_conditional(batch, length), "added_cond_kwargs": added}


def _classes(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _latent(batch),
        "timestep": _steps(batch),
        "class_labels": torch.randint(0, 10, (batch,)),
    }


def _pixart(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _latent(batch),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _pooled(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _latent(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": _steps(batch),
    }


def _flux(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 16, 4),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": torch.rand(batch),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(length, 3),
    }


def _flow_text(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _latent(batch),
        "timestep": torch.rand(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
    }


def _video(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 2, 8, 8),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
    }


def _frames(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 2, 4, 8, 8),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, 8, 16),
    }


def _video_unet(batch: int, length: int) -> dict[str, Any]:
    return {
        "sample": torch.randn(batch, 4, 2, 8, 8),
        "timestep": _steps(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
    }


def _clip(channels: int) -> Make:
    return lambda batch, length: {"sample": torch.randn(batch, channels, 5, 16, 16)}


def _sana(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": _latent(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "timestep": _steps(batch),
    }


def _prior(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 16),
        "timestep": _steps(batch),
        "proj_embedding": torch.randn(batch, 16),
        "encoder_hidden_states": torch.randn(batch, 7, 16),
    }


_CONDITIONED: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
_UNET = {**_CONDITIONED, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_CODER = {
    "block_out_channels": (16, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
}

# name: class, configuration, inputs
_LISTED: dict[str, tuple[str, dict[str, Any], Make]] = {
    "unet-2d": (
        "UNet2DModel",
        {
            "sample_size": 16,
            "block_out_channels": (16, 32),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "norm_num_groups": 8,
            "layers_per_block": 1,
            "attention_head_dim": 8,
        },
        _unconditional,
    ),
    "unet-2d-condition": ("UNet2DConditionModel", _UNET, _conditional),
    "unet-2d-condition-xl": (
        "UNet2DConditionModel",
        {
            **_UNET,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
            "use_linear_projection": True,
        },
        _xl,
    ),
    "unet-1d": (
        "UNet1DModel",
        {"sample_size": 16, "extra_in_channels": 64, "block_out_channels": (32, 32, 64)},
        lambda batch, length: {"sample": torch.randn(batch, 2, 64), "timestep": _steps(batch)},
    ),
    "unet-3d-condition": (
        "UNet3DConditionModel",
        {
            **_UNET,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        _video_unet,
    ),
    "controlnet": (
        "ControlNetModel",
        {
            **{k: v for k, v in _CONDITIONED.items() if k != "sample_size"},
            "conditioning_embedding_out_channels": (8, 16),
        },
        _control,
    ),
    "autoencoder-kl": ("AutoencoderKL", _CODER, _image(3, 16)),
    "autoencoder-tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        _image(3, 16),
    ),
    "autoencoder-asymmetric": (
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",),
            "down_block_out_channels": (16,),
            "up_block_types": ("UpDecoderBlock2D",),
            "up_block_out_channels": (16,),
            "norm_num_groups": 8,
        },
        _image(3, 16),
    ),
    "autoencoder-vq": ("VQModel", {**_CODER, "latent_channels": 3, "num_vq_embeddings": 32}, _image(3, 16)),
    "autoencoder-dc": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (16, 32),
            "decoder_block_out_channels": (16, 32),
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "attention_head_dim": 8,
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        _image(3, 16),
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**_DIT, "num_embeds_ada_norm": 10, "out_channels": 8, "norm_type": "ada_norm_zero"},
        _classes,
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**_DIT, "cross_attention_dim": 16, "caption_channels": 16, "use_additional_conditions": False},
        _pixart,
    ),
    "transformer-2d": (
        "Transformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 16,
            "norm_num_groups": 8,
            "cross_attention_dim": 16,
        },
        lambda batch, length: {
            "hidden_states": _latent(batch, 16),
            "encoder_hidden_states": torch.randn(batch, length, 16),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_DIT,
            "patch_size": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        },
        _pooled,
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux,
    ),
    "aura-flow": (
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        _flow_text,
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "sample_size": 8,
        },
        _sana,
    ),
    "prior": (
        "PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "embedding_dim": 16,
            "num_embeddings": 7,
            "additional_embeddings": 4,
        },
        _prior,
    ),
    "latte": (
        "LatteTransformer3DModel",
        {
            "sample_size": 8,
            "num_layers": 1,
            "patch_size": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_channels": 16,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "out_channels": 8,
            "norm_type": "ada_norm_single",
            "video_length": 2,
            "num_embeds_ada_norm": 1000,
        },
        _video,
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "max_text_seq_length": 8,
        },
        _frames,
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        _video,
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 1,
            "caption_channels": 16,
        },
        lambda batch, length: {
            "hidden_states": torch.randn(batch, 32, 4),
            "encoder_hidden_states": torch.randn(batch, length, 16),
            "timestep": _steps(batch),
            "encoder_attention_mask": torch.ones(batch, length),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
}


def entries() -> tuple[Entry, ...]:
    """The list."""
    import diffusers  # noqa: PLC0415, F401  may be missing

    return tuple(_entry(name, *listed) for name, listed in _LISTED.items())


def _entry(name: str, kind: str, config: dict[str, Any], make: Make) -> Entry:
    return Entry(
        name,
        "diffusers",
        partial(_build, kind, config),
        lambda _: ((), make(2, 6)),
        lambda _: ((), make(4, 10)),
        fast=name == "dit",
    )


def _build(kind: str, config: dict[str, Any]) -> nn.Module:
    import diffusers  # noqa: PLC0415

    model: nn.Module = getattr(diffusers, kind)(**config)
    return model
