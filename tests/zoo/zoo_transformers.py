"""Architectures of transformers with tiny configurations.

A configuration is made from the architecture's own defaults: whatever is in ``_SMALL`` is replaced, in the
configurations that it contains too.  What that does not make small or consistent enough is told by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

_VOCABULARY = 100
_WIDTHS = (
    "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim", "model_dim",
    "projection_dim", "text_embed_dim", "vision_embed_dim", "embed_dim_out", "shared_latent_size", "output_dim",
    "encoder_hidden_size", "decoder_hidden_size", "conv_dim_out", "rnn_hidden_size", "classifier_proj_size",
    "hidden_sizes_dim", "d_embed", "mm_hidden_size", "lru_width", "out_hidden_size", "attention_hidden_size",
    "backbone_hidden_size", "cross_attention_hidden_size", "output_hidden_size", "vision_hidden_size",
)  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
    "num_decoder_layers", "num_encoder_layers", "encoder_num_layers", "decoder_num_layers",
    "decoder_num_hidden_layers", "encoder_num_hidden_layers", "num_layers_enc", "num_layers_dec",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads",
)  # fmt: skip
_INNER = (
    "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "n_inner", "mlp_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_intermediate_size", "ffn_hidden_size",
    "mlp_hidden_size", "encoder_intermediate_size", "shared_intermediate_size", "expert_ffn_size",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_num_key_value_heads", "n_kv_head"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "d_head", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "index_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "n_vocab"), _VOCABULARY),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "n_ctx", "context_length"), 64),
    "q_lora_rank": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 4,
    "state_size": 8,
    "mamba_d_state": 8,
    "chunk_size": 4,
    "time_step_rank": 4,
}
Overrides = dict[str, Any]


def _config(kind: type, given: Overrides) -> Any:
    """A configuration of *kind* with all that is known to be small."""
    accepted = dict(inspect.signature(kind).parameters)
    values: dict[str, Any] = {name: small for name, small in _SMALL.items() if name in accepted}
    for name, inner in getattr(kind, "sub_configs", {}).items():
        below = given.get(name, {})
        if inner.__name__ != "AutoConfig" and isinstance(below, dict):
            values[name] = _config(inner, below)
    values |= {name: value for name, value in given.items() if name not in values or not isinstance(value, dict)}
    return kind(**values)


# --- inputs: for a batch and a length ----------------------------------------------------------------------


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (batch, length))


def _mask(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 2 :] = 0
    return mask


def _text(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch, length), "attention_mask": _mask(batch, length)}


def _language(config: Any, batch: int, length: int) -> dict[str, Any]:
    text = _text(config, batch, length)
    return {**text, "labels": text["input_ids"].clone()}


def _no_mask(config: Any, batch: int, length: int) -> dict[str, Any]:
    ids = _ids(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _ids_only(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch, length)}


def _translation(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {**_text(config, batch, length), "labels": _ids(batch, length - 2)}


def _side(config: Any) -> int:
    side = getattr(config, "image_size", None) or 32
    return side if isinstance(side, int) else int(side[0])


def _pixels(config: Any, batch: int, length: int) -> dict[str, Any]:
    side = _side(getattr(config, "vision_config", config))
    return {"pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), side, side)}


def _classes(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {**_pixels(config, batch, length), "labels": torch.randint(0, 3, (batch,))}


def _segments(config: Any, batch: int, length: int) -> dict[str, Any]:
    pixels = _pixels(config, batch, length)
    return {**pixels, "labels": torch.randint(0, 3, (batch, *pixels["pixel_values"].shape[2:]))}


def _large_pixels(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 64, 64)}


def _wave(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 2000 + 200 * length)}


def _speech_labels(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {**_wave(config, batch, length), "labels": torch.randint(1, 20, (batch, 3))}


def _features(config: Any, batch: int, length: int) -> dict[str, Any]:
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    return {"input_features": torch.randn(batch, 64, bins), "labels": _ids(batch, length)}


def _mel(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, config.num_mel_bins, 128), "labels": _ids(batch, length)}


def _pair(config: Any, batch: int, length: int) -> dict[str, Any]:
    pixels = _pixels(config, batch, length)
    return {**_text(config, batch, length), **pixels, "return_loss": True}


def _question(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {**_text(config, batch, length), **_pixels(config, batch, length)}


def _video(config: Any, batch: int, length: int) -> dict[str, Any]:
    side, frames = _side(config), getattr(config, "num_frames", 4)
    return {"pixel_values": torch.randn(batch, frames, 3, side, side)}


def _layout(config: Any, batch: int, length: int) -> dict[str, Any]:
    corners = torch.randint(0, 60, (batch, length, 2))
    boxes = torch.cat([corners, corners + torch.randint(1, 30, (batch, length, 2))], -1)
    return {**_language(config, batch, length), "bbox": boxes}


def _series(config: Any, batch: int, length: int) -> dict[str, Any]:
    history = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
    future = config.prediction_length
    return {
        "past_values": torch.randn(batch, history),
        "past_time_features": torch.randn(batch, history, config.num_time_features),
        "past_observed_mask": torch.ones(batch, history),
        "future_values": torch.randn(batch, future),
        "future_time_features": torch.randn(batch, future, config.num_time_features),
    }


def _patches(config: Any, batch: int, length: int) -> dict[str, Any]:
    shape = (batch, config.context_length, config.num_input_channels)
    return {"past_values": torch.randn(shape)}


Make = Callable[[Any, int, int], dict[str, Any]]

# Which automatic class makes the model, and its inputs.
_KINDS: dict[str, tuple[str, Make]] = {
    "causal": ("AutoModelForCausalLM", _language),
    "causal without mask": ("AutoModelForCausalLM", _no_mask),
    "seq2seq": ("AutoModelForSeq2SeqLM", _translation),
    "masked": ("AutoModelForMaskedLM", _language),
    "pretraining": ("AutoModelForPreTraining", _text),
    "ids": ("AutoModel", _ids_only),
    "text": ("AutoModel", _text),
    "image classes": ("AutoModelForImageClassification", _classes),
    "segmentation": ("AutoModelForSemanticSegmentation", _segments),
    "detection": ("AutoModelForObjectDetection", _large_pixels),
    "universal": ("AutoModelForUniversalSegmentation", _large_pixels),
    "depth": ("AutoModelForDepthEstimation", _pixels),
    "super resolution": ("AutoModelForImageToImage", _pixels),
    "backbone": ("AutoBackbone", _pixels),
    "image": ("AutoModel", _pixels),
    "large image": ("AutoModel", _large_pixels),
    "masked image": ("AutoModelForMaskedImageModeling", _pixels),
    "video classes": ("AutoModelForVideoClassification", _video),
    "video": ("AutoModel", _video),
    "speech": ("AutoModelForCTC", _speech_labels),
    "audio": ("AutoModel", _wave),
    "audio features": ("AutoModel", _features),
    "speech to text": ("AutoModelForSpeechSeq2Seq", _features),
    "mel to text": ("AutoModelForSpeechSeq2Seq", _mel),
    "image and text": ("AutoModel", _pair),
    "question": ("AutoModel", _question),
    "layout": ("AutoModelForTokenClassification", _layout),
    "layout text": ("AutoModel", _layout),
    "series": ("AutoModelForTimeSeriesPrediction", _series),
    "any series": ("AutoModel", _series),
    "patches": ("AutoModelForTimeSeriesPrediction", _patches),
    "any patches": ("AutoModel", _patches),
}

# Further values of a configuration, by model type.
_GIVEN: dict[str, Overrides] = {}


def _entry(model_type: str, kind: str) -> Entry:
    make = _KINDS[kind][1]

    def inputs(batch: int, length: int, training: bool) -> Inputs:
        given = make(_config_of(model_type), batch, length)
        return (), given

    return Entry(
        model_type,
        "transformers",
        partial(_build, model_type, kind),
        partial(inputs, 2, 8),
        partial(inputs, 4, 12),
    )


def _config_of(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  may be missing

    return _config(CONFIG_MAPPING[model_type], _GIVEN.get(model_type, {}))


def _build(model_type: str, kind: str) -> nn.Module:
    import transformers  # noqa: PLC0415

    automatic = getattr(transformers, _KINDS[kind][0])
    model: nn.Module = automatic.from_config(_config_of(model_type))
    return model


def entries() -> tuple[Entry, ...]:
    """The list."""
    import transformers  # noqa: PLC0415, F401

    return tuple(_entry(model_type, kind) for model_type, kind in _LISTED.items())


_LISTED: dict[str, str] = {}
