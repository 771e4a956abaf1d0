"""Overrides as values: made by verbs, read from and written to JSON, refused where they say nothing."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional

from fxamp.errors import PolicyError
from fxamp.policy import CastPolicy, Policy
from fxamp.policy.override import Override, Verb
from fxamp.policy.selector import Selector
from fxamp.policy.site import Site

CPU = Policy.native("cpu", torch.bfloat16)


def is_wide(site: Site) -> bool:
    """A predicate that a file can name."""
    return any(fact.shape and fact.shape[-1] == 8 for fact in site.inputs)


@pytest.mark.parametrize(
    ("make", "verb"),
    [
        (lambda: CPU.keep("float32", op="aten::mm"), Verb.KEEP_FLOAT32),
        (lambda: CPU.force("low", op="aten::mm"), Verb.FORCE_LOW),
        (lambda: CPU.promote(op="aten::mm"), Verb.PROMOTE),
        (lambda: CPU.leave(op="aten::mm"), Verb.LEAVE),
        (lambda: CPU.keep("float32", returns="low", op="aten::mm"), Verb.FLOAT32_TO_LOW),
    ],
)
def test_a_verb_gives_a_new_policy_with_one_override_more(make: Callable[[], Policy], verb: Verb) -> None:
    policy = make()
    assert [override.verb for override in policy.overrides] == [verb]
    assert CPU.overrides == ()
    assert policy != CPU
    assert policy.rules == CPU.rules
    assert not policy.is_torchs_own
    assert CPU.is_torchs_own


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ops.aten.softmax.int, "aten::softmax.int"),
        (torch.ops.aten.softmax, "aten::softmax"),
        ("aten::softmax", "aten::softmax"),
        (torch.softmax, "aten::softmax"),
        ("torch.softmax", "aten::softmax"),
        (functional.gelu, "aten::gelu"),
        (functional.layer_norm, "torch.nn.functional.layer_norm"),
        ("torch.nn.functional.layer_norm", "torch.nn.functional.layer_norm"),
        (functional.normalize, "torch.nn.functional.normalize"),
    ],
)
def test_an_operator_is_named_in_many_ways(given: Any, text: str) -> None:
    assert CPU.keep("float32", op=given).overrides[0].selector == Selector(op=text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("encoder.*.attention", "encoder.*.attention"),
        (re.compile(r"layers\.[0-3]$"), r"re:layers\.[0-3]$"),
        (nn.LayerNorm, "class:torch.nn.modules.normalization.LayerNorm"),
    ],
)
def test_a_module_is_named_by_path_expression_or_class(given: Any, text: str) -> None:
    assert CPU.keep("float32", module=given).overrides[0].selector == Selector(module=text)


def a_local_function(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({}, "none of them is given"),
        ({"op": "aten::sofmax"}, "no operator 'aten::sofmax'\n  near to it:  aten::softmax"),
        ({"op": "aten::softmax.in"}, "near to it:  aten::softmax.int"),
        ({"op": "torch.sofmax"}, "no function 'torch.sofmax'"),
        ({"op": "aten::view"}, "gives a view of its argument"),
        ({"op": "aten::add_"}, "writes to an argument"),
        ({"op": "aten::to"}, "converts; the model says to which dtype"),
        ({"op": "aten::cat"}, "moves values as they are"),
        ({"op": "aten::zeros_like"}, "computes nothing from the values"),
        ({"op": 3}, "takes an operator, a function"),
        ({"op": lambda x: x}, "at the top level of a module"),
        ({"module": ""}, "selects nothing"),
        ({"module": "re:("}, "no regular expression"),
        ({"module": nn.Linear(1, 1)}, "a path, a compiled regular expression or a class"),
        ({"where": "a:b:c"}, "no source line"),
    ],
)
def test_a_selection_of_nothing_is_refused_with_a_way_out(selection: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        CPU.keep("float32", **selection)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CPU.keep("float16", op="aten::mm"),  # type: ignore[arg-type]
        lambda: CPU.force("float32", op="aten::mm"),  # type: ignore[arg-type]
        lambda: CPU.keep("float32", returns="float32", op="aten::mm"),  # type: ignore[arg-type]
    ],
)
def test_a_verb_takes_the_one_dtype_that_it_is_for(make: Callable[[], Policy]) -> None:
    with pytest.raises(PolicyError, match="takes '"):
        make()


OVERRIDES = st.builds(
    Override,
    verb=st.sampled_from(Verb),
    selector=st.builds(
        Selector.of,
        op=st.sampled_from(["aten::mm", "aten::softmax.int", torch.nn.functional.layer_norm, torch.exp]),
        module=st.one_of(st.none(), st.sampled_from(["a.*", re.compile("b"), nn.Linear])),
        where=st.one_of(st.none(), st.sampled_from(["m.py", "m.py:3", "m.py:3-9", "m.py:forward", is_wide])),
    ),
    why=st.text(max_size=8),
    optional=st.booleans(),
)


@settings(deadline=None)
@given(
    overrides=st.lists(OVERRIDES, max_size=4),
    device=st.sampled_from(["cpu", "cuda", "mps", "xpu", "mtia"]),
    low=st.sampled_from([torch.float16, torch.bfloat16]),
    kind=st.sampled_from([Policy.native, Policy.everything_low]),
    on=st.sampled_from(["", "cpu"]),
)
def test_every_policy_comes_back_from_its_json(
    overrides: list[Override], device: str, low: torch.dtype, kind: Callable[..., Policy], on: str
) -> None:
    policy = kind(device, low)
    policy = policy.on(on) if on else policy
    for override in overrides:
        policy = policy._with(override)
    back = Policy.from_json(policy.to_json())
    assert [str(override) for override in back.overrides] == [str(override) for override in policy.overrides]
    assert back.to_json() == policy.to_json()
    assert (back.rules, back.low, back.device_type, back.table) == (
        policy.rules,
        policy.low,
        policy.device_type,
        policy.table,
    )


def test_a_policy_with_overrides_is_a_value() -> None:
    policy = CPU.keep("float32", module="head", why="logits").force("low", op=torch.exp)
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert len({policy, copy.copy(policy)}) == 1


def test_a_predicate_without_a_name_cannot_be_written_down() -> None:
    with pytest.raises(PolicyError, match="define it at the top level"):
        CPU.keep("float32", where=lambda site: True).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(extra=1), "this has others"),
        (lambda data: data.update(low="float64"), "no torch.float64 mode"),
        (lambda data: data["overrides"].append({"verb": "melt"}), "no verb 'melt'"),
        (lambda data: data["overrides"].append({"verb": "leave", "oops": 1}), "has no oops"),
        (lambda data: data["overrides"].append({"verb": "leave", "op": "aten::nope"}), "no operator"),
        (lambda data: data["rules"].update(melt="aten::mm"), "no rule does 'melt'"),
    ],
)
def test_json_that_is_no_policy_is_refused(change: Callable[[Any], Any], message: str) -> None:
    data = json.loads(CPU.to_json())
    change(data)
    with pytest.raises(PolicyError, match=re.escape(message)):
        Policy.from_json(json.dumps(data))


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(PolicyError, match="written as JSON"):
        Policy.from_json("{")


# --- ready-made policies --------------------------------------------------------------------------------


def test_rms_norm_has_no_rule_before_its_time() -> None:
    assert Policy.native("cuda", torch.float16).rule("aten::rms_norm") is not None
    pinned = Policy.native("cuda", torch.float16, torch_version="2.11.0+cpu")
    assert pinned.rule("aten::rms_norm") is None
    assert pinned.rule("aten::mm") == Policy.native("cuda", torch.float16).rule("aten::mm")
    assert not pinned.is_torchs_own


def test_the_installed_version_is_no_other_policy() -> None:
    version = torch.__version__
    assert Policy.native("cpu", torch.bfloat16, torch_version=version) == CPU


@pytest.mark.parametrize("version", ["2.5", "9.0", "new"])
def test_a_version_that_is_not_covered_is_refused(version: str) -> None:
    with pytest.raises(PolicyError):
        Policy.native("cpu", torch.bfloat16, torch_version=version)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_low_keeps_norms_and_losses(device: str) -> None:
    native, low = Policy.native(device, torch.float16), Policy.everything_low(device, torch.float16)
    kept = ("aten::layer_norm", "aten::group_norm", "aten::mse_loss", "aten::nll_loss_nd")
    assert all(rule is not None and rule.cast is CastPolicy.FP32 for rule in map(low.rule, kept))
    changed = {op for op, rule in native.rules.items() if low.rules[op].cast is not rule.cast}
    assert all(low.rules[op].cast is CastPolicy.LOWER_PRECISION_FP for op in changed)
    assert not any(
        op.endswith(("_loss", "layer_norm", "group_norm", "rms_norm", "vector_norm")) for op in changed
    )
    assert changed >= ({"aten::exp", "aten::softmax.int"} if device == "cuda" else {"aten::fft_fft"})
