"""Language models of transformers: losses, logits, gradients, caches, generated tokens as in eager autocast.

transformers leaves the mask out where it is all ones, except while it is traced; so a call without a mask,
with ones and with padding are three different computations, in which gradients have other bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fxamp
from fxamp.capture.structure import flatten
from tests.models import autocast, equal

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = 99
SMALL = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": WORDS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DECODERS: dict[str, Callable[[int], Any]] = {
    "llama": lambda layers: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **HEADS, num_hidden_layers=layers)
    ),
    "qwen3": lambda layers: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, **HEADS, num_hidden_layers=layers, head_dim=8)
    ),
    "gpt2": lambda layers: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=layers, n_head=4, n_positions=64, vocab_size=WORDS)
    ),
    "gemma": lambda layers: transformers.GemmaForCausalLM(
        transformers.GemmaConfig(
            **SMALL, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1, head_dim=8
        )
    ),
    "t5": lambda layers: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=layers,
            num_heads=4,
            vocab_size=WORDS,
            decoder_start_token_id=0,
        )
    ),
}
DTYPES = (torch.bfloat16, torch.float16)
MASKS = ("none", "ones", "padded")
LENGTHS = (7, 7, 5, 7)


def _model(name: str, layers: int = 2) -> Any:
    torch.manual_seed(0)
    return DECODERS[name](layers)


def _inputs(mask: str, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens, labels = torch.randint(3, WORDS - 1, (2, 2, length), generator=generator)
    inputs = {"input_ids": tokens, "labels": labels}
    if mask != "none":
        inputs["attention_mask"] = torch.ones_like(tokens)
    if mask == "padded":
        inputs["attention_mask"][0, :3] = 0
    return inputs


def _step(model: Any, call: Any, inputs: dict[str, Tensor], scope: Any) -> tuple[Any, list[Tensor]]:
    """What a call returns, taken apart into its structure and tensors, with every gradient."""
    torch.manual_seed(3)
    model.zero_grad()
    with scope:
        out = call(**inputs, use_cache=True)
    out.loss.backward()
    _, tensors = flatten(out)
    kinds = [type(out), *map(str, out.keys())]
    return kinds, [*tensors, *(each.grad for each in model.parameters())]


def _check(plain: Any, dtype: torch.dtype, mask: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    source = copy.deepcopy(plain)
    amp = fxamp.convert(source, device_type="cpu", dtype=dtype)
    for length in lengths:
        inputs = _inputs(mask, length)
        kinds, expected = _step(plain, plain, inputs, autocast(dtype))
        found_kinds, found = _step(source, amp, inputs, nullcontext())
        assert found_kinds == kinds
        assert len(found) == len(expected) > 10
        assert all(map(equal, found, expected))
    assert amp.eager_modules == ()


def _check_generation(plain: Any, *, use_cache: bool, mask: str) -> None:
    amp = fxamp.convert(copy.deepcopy(plain), device_type="cpu", dtype=torch.bfloat16)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": use_cache}
    more = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "eos_token_id": WORDS}
    graphs = []
    for length in LENGTHS:
        inputs = _inputs(mask, length)
        del inputs["labels"]
        with autocast(torch.bfloat16):
            expected = plain.generate(**inputs, **options, **more)
        found = amp.generate(**inputs, **options, **more)
        assert equal(found.sequences, expected.sequences)
        assert all(map(equal, found.logits, expected.logits))
        graphs.append(len(amp.graph_modules))
    # prefill, the first step and further steps; where a mask is read, each in several segments
    assert graphs[1] == graphs[0]
    assert graphs[3] == graphs[2] <= (12 if mask == "padded" else 6)
    assert amp.eager_modules == ()


@pytest.mark.parametrize(
    ("name", "mask"),
    [("llama", "none"), ("llama", "ones"), ("llama", "padded"), ("gpt2", "none"), ("gpt2", "ones")],
)
def test_a_decoder_of_one_layer_is_eager_autocast(name: str, mask: str) -> None:
    _check(_model(name, 1).train(), torch.bfloat16, mask)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_eager_autocast(name: str, dtype: torch.dtype, training: bool, mask: str) -> None:
    lengths = (7, 7) if name == "t5" and mask != "none" else LENGTHS
    _check(_model(name).train(training), dtype, mask, lengths)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("mask", ["ones", "padded"])
def test_an_encoder_decoder_with_a_mask_of_another_length_is_eager_autocast(mask: str) -> None:
    _check(_model("t5").train(), torch.bfloat16, mask)


def test_a_decoder_that_looks_for_padding_itself_is_eager_autocast() -> None:
    """Transformers reads the tokens where the config has a padding token and there is no mask."""
    plain = _model("gpt2", 1).train()
    plain.config.pad_token_id = 0
    _check(plain, torch.bfloat16, "none")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_decoder_of_one_layer_generates_as_under_eager_autocast(use_cache: bool) -> None:
    _check_generation(_model("llama", 1).eval(), use_cache=use_cache, mask="none")


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("mask", ["none", "padded"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_generates_as_under_eager_autocast(name: str, use_cache: bool, mask: str) -> None:
    _check_generation(_model(name).eval(), use_cache=use_cache, mask=mask)
