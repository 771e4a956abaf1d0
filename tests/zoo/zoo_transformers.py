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
    "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim",
    "model_dim", "projection_dim", "text_embed_dim", "vision_embed_dim", "embed_dim_out",
    "shared_latent_size", "output_dim", "encoder_hidden_size", "decoder_hidden_size", "conv_dim_out",
    "rnn_hidden_size", "classifier_proj_size", "hidden_sizes_dim", "d_embed", "mm_hidden_size",
    "lru_width", "out_hidden_size", "attention_hidden_size", "backbone_hidden_size",
    "cross_attention_hidden_size", "output_hidden_size", "vision_hidden_size",
)  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "depth", "num_decoder_layers", "num_encoder_layers", "encoder_num_layers", "decoder_num_layers",
    "decoder_num_hidden_layers", "encoder_num_hidden_layers", "num_layers_enc", "num_layers_dec",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads",
)  # fmt: skip
_INNER = (
    "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "n_inner",
    "mlp_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_intermediate_size",
    "ffn_hidden_size", "mlp_hidden_size", "encoder_intermediate_size", "shared_intermediate_size",
    "expert_ffn_size",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_num_key_value_heads", "n_kv_head"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "attention_head_size", "d_head", "qk_rope_head_dim", "v_head_dim"), 8
    ),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "index_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "n_vocab"), _VOCABULARY),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2
    ),
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
    accepted = inspect.signature(kind).parameters
    values: dict[str, Any] = {
        name: small
        for name, small in _SMALL.items()
        if name in accepted and not isinstance(_default(kind, name), (list, tuple))
    }
    for name, inner in getattr(kind, "sub_configs", {}).items():
        below = given.get(name, {})
        if inner.__name__ != "AutoConfig" and isinstance(below, dict):
            values[name] = _config(inner, below)
    values |= {
        name: value for name, value in given.items() if name not in values or not isinstance(value, dict)
    }
    config = kind(**values)
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 1
    return config


def _default(kind: type, name: str) -> Any:
    return getattr(kind, name, inspect.signature(kind).parameters[name].default)


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
    channels: int = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(batch, channels, side, side)}


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
    bins: int = getattr(config, "num_mel_bins", 0) or getattr(config, "input_feat_per_channel", 80)
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


def _fixed_mel(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, config.max_length, config.num_mel_bins)}


def _one_channel(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 1, 2000)}


def _audio_text(config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 3000), "labels": _ids(batch, length)}


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
    "spectrogram": ("AutoModelForAudioClassification", _fixed_mel),
    "one channel": ("AutoModel", _one_channel),
    "audio to text": ("AutoModelForSpeechSeq2Seq", _audio_text),
    "image and text": ("AutoModel", _pair),
    "question": ("AutoModel", _question),
    "layout": ("AutoModelForTokenClassification", _layout),
    "layout text": ("AutoModel", _layout),
    "series": ("AutoModelForTimeSeriesPrediction", _series),
    "any series": ("AutoModel", _series),
    "patches": ("AutoModelForTimeSeriesPrediction", _patches),
    "any patches": ("AutoModel", _patches),
}

_FAST = {"bert", "vit"}
# Evaluation leaves the cache of keys and values as the model likes it, which is on; training does without.
_WITH_CACHE = {"causal", "causal without mask", "seq2seq", "speech to text", "mel to text", "audio to text"}

# Further values of a configuration, by model type.


def _each(types: tuple[str, ...], given: Overrides) -> dict[str, Overrides]:
    return {model_type: dict(given) for model_type in types}


_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
}
_BACKBONE: Overrides = {
    "backbone_config": {**_RESNET, "out_features": ["stage4"]},
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_queries": 5,
}
_PYRAMID: Overrides = {
    **_BACKBONE,
    "backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]},
    "num_feature_levels": 3,
}
_LATENT = {"num_key_value_heads": 4}
_SWIN = {
    "embed_dim": 12,
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
    "patch_size": 2,
}
_GIVEN: dict[str, Overrides] = {
    **_each(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3"), _LATENT),
    **_each(("axk1", "axk2", "glm_moe_dsa", "youtu", "longcat_flash"), _LATENT),
    **_each(("codegen", "gptj"), {"rotary_dim": 4}),
    **_each(("detr", "conditional_detr", "table-transformer", "dab-detr"), _BACKBONE),
    **_each(("deformable_detr",), _PYRAMID),
    **_each(
        ("informer", "autoformer", "time_series_transformer"), {"prediction_length": 4, "context_length": 16}
    ),
    **_each(("swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr"), _SWIN),
    **_each(
        ("bamba", "granitemoehybrid"),
        {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    ),
    **_each(
        ("resnet", "regnet", "convnext", "convnextv2", "bit"),
        {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]},
    ),
    "dinat": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "dilations": [[1], [1]],
        "kernel_size": 3,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "esmc": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "lilt": {"hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "mobilevitv2": {"width_multiplier": 0.25},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "efficientformer": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
    "glpn": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "pvt": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "pvt_v2": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 32]},
    "hiera": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "image_size": [32, 32],
        "masked_unit_size": [4, 4],
    },
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 1, 1]},
    "levit": {
        "hidden_sizes": [16, 16, 32],
        "num_attention_heads": [1, 1, 2],
        "depths": [1, 1, 1],
        "image_size": 64,
    },
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "num_buckets": 2,
        "is_decoder": False,
    },
    "xlnet": {"d_inner": 48},
    "rwkv": {"attention_hidden_size": 32},
    "encodec": {"num_filters": 4, "codebook_size": 16, "codebook_dim": 16, "hidden_size": 16},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "codebook_size": 16, "codebook_dim": 4},
    "univnet": {"model_hidden_channels": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "vits": {"hidden_size": 16, "flow_size": 16, "upsample_initial_channel": 32, "spectrogram_bins": 17},
    "timesformer": {"num_frames": 4},
    "videomae": {"num_frames": 4},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "xmod": {"default_language": "en_XX"},
    "superpoint": {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
}


def _entry(model_type: str, kind: str) -> Entry:
    make = _KINDS[kind][1]

    def inputs(batch: int, length: int, training: bool) -> Inputs:
        given = make(_config_of(model_type), batch, length)
        if training and kind in _WITH_CACHE:
            given["use_cache"] = False
        return (), given

    return Entry(
        model_type,
        "transformers",
        partial(_build, model_type, kind),
        partial(inputs, 2, 8),
        partial(inputs, 4, 12),
        fast=model_type in _FAST,
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

    return tuple(_entry(model_type, kind) for kind, types in _LISTED.items() for model_type in types)


# Model types by the kind of model.
# fmt: off
_LISTED: dict[str, tuple[str, ...]] = {
    "any patches": (
        "patchtsmixer", "patchtst",
    ),
    "any series": (
        "autoformer", "informer", "time_series_transformer",
    ),
    "audio features": (
        "lasr_encoder", "nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio",
        "nemotron_asr_streaming_encoder", "univnet",
    ),
    "audio to text": (
        "speecht5",
    ),
    "backbone": (
        "dinov2", "dinov2_with_registers", "dinov3_vit", "focalnet", "maskformer-swin", "pixio",
        "pp_lcnet_v3", "pp_lcnet_v4", "resnet", "rf_detr_dinov2", "sapiens2", "swin", "swinv2",
        "vitdet",
    ),
    "causal": (
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "bert-generation",
        "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1",
        "dots3_note_text", "emu3", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe",
        "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text",
        "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
        "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium",
        "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax",
        "inkling_text", "internlm3", "jais2", "jamba", "jetmoe", "kolibri1", "laguna", "lara_mini",
        "lfm2", "llama", "llama4", "llama4_text", "mamba", "mamba2", "mellum", "mimo_v2_flash",
        "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral",
        "mixtral", "mllama", "modernbert-decoder", "moshi", "mpt", "nanochat", "nemotron", "nemotron_h",
        "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "persimmon", "phi",
        "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "recurrent_gemma", "rwkv",
        "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr",
        "vaultgemma", "xglm", "xlnet", "youtu",
    ),
    "detection": (
        "conditional_detr", "dab-detr", "deformable_detr", "detr", "pp_ocrv5_mobile_det",
        "table-transformer", "yolos",
    ),
    "ids": (
        "canine", "clip_text_model", "dpr", "embedding_gemma2", "fastspeech2_conformer", "git",
        "granite_docling_text", "higgs_audio_v2", "imagegpt", "inkling2_text", "layoutlmv3", "lilt",
        "markuplm", "minimax_m3_vl", "molmo2_text", "muse_glimmer_text", "muse_spark_text",
        "openai_privacy_filter", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
        "qwen3_vl_moe_text", "qwen3_vl_text", "splinter", "step3p7", "tipsv2", "vits",
    ),
    "image": (
        "clip_vision_model", "deit", "donut-swin", "dpt", "idefics3_vision", "ijepa", "internvl_vision",
        "mlcd", "mobilenet_v1", "pixtral", "poolformer", "radio", "sam3_vit_model", "segformer",
        "swiftformer", "vit", "vit_mae",
    ),
    "image and text": (
        "aimv2", "altclip", "blip", "chinese_clip", "clip", "clipseg", "groupvit", "owlv2", "owlvit",
        "vilt",
    ),
    "image classes": (
        "beit", "data2vec-vision", "efficientnet", "mobilenet_v2", "mobilevit", "pp_lcnet", "regnet",
        "siglip", "vit_msn",
    ),
    "large image": (
        "convnext", "convnextv2", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec",
    ),
    "masked": (
        "albert", "bert", "big_bird", "convbert", "deberta", "deberta-v2", "distilbert", "electra",
        "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert",
        "jina_embeddings_v3", "layoutlm", "longformer", "megatron-bert", "mobilebert", "modernbert",
        "mpnet", "mra", "nomic_bert", "nystromformer", "reformer", "rembert", "roberta",
        "roberta-prelayernorm", "roformer", "squeezebert", "tapas", "ultrabert", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xmod", "yoso",
    ),
    "mel to text": (
        "whisper",
    ),
    "one channel": (
        "dac", "encodec",
    ),
    "pretraining": (
        "flava", "fsmt", "inkling_mm_model", "visual_bert",
    ),
    "seq2seq": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "longt5", "m2m_100",
        "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
        "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5",
    ),
    "spectrogram": (
        "audio-spectrogram-transformer",
    ),
    "speech": (
        "data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2",
        "wav2vec2-conformer", "wavlm",
    ),
    "speech to text": (
        "speech_to_text",
    ),
    "video classes": (
        "timesformer", "videomae", "vivit",
    ),
}
