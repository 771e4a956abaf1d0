"""The policy as a value: made from the table and the dispatcher, compared, copied, moved."""

import copy
import pickle
import warnings

import pytest
import torch

from fxamp.errors import FxampError, PolicyError
from fxamp.policy import CastPolicy, OpRule, Policy
from fxamp.policy import policy as policy_module
from fxamp.policy.dispatcher import AUTOCAST_KEYS, registered, registered_operators

DEVICES = sorted(AUTOCAST_KEYS)
CPU_ONLY = OpRule("aten::mm", CastPolicy.FP32, frozenset({"cpu"}), "a row for a test")


@pytest.mark.parametrize("device", DEVICES)
def test_the_native_policy_has_a_rule_for_exactly_what_the_dispatcher_registers(device: str) -> None:
    policy = Policy.native(device, torch.float16)
    assert policy.rules.keys() == registered_operators(device)
    assert all(device in rule.devices for rule in policy.rules.values())


@pytest.mark.parametrize(
    ("device", "op", "cast"),
    [
        ("cuda", "aten::mm", CastPolicy.LOWER_PRECISION_FP),
        ("cuda", "aten::softmax.int", CastPolicy.FP32_SET_OPT_DTYPE),
        ("mps", "aten::softmax.int", CastPolicy.FP32),
        ("cpu", "aten::softmax.int", None),
        ("cuda", "aten::grid_sampler", CastPolicy.PROMOTE),
        ("cpu", "aten::grid_sampler", CastPolicy.FP32),
        ("cuda", "aten::binary_cross_entropy", CastPolicy.BANNED),
        ("cpu", "aten::binary_cross_entropy", CastPolicy.FP32),
        ("mps", "aten::binary_cross_entropy", None),
        ("cpu", "aten::cat", CastPolicy.PROMOTE),
        ("cuda", "aten::cat", None),
        ("cuda", "aten::no_such_operator", None),
    ],
)
def test_an_operator_may_have_another_rule_on_another_device(
    device: str, op: str, cast: CastPolicy | None
) -> None:
    rule = Policy.native(device, torch.float16).rule(op)
    assert (rule.cast if rule else None) is cast


def test_a_rule_is_found_by_the_overload_itself() -> None:
    policy = Policy.native("cpu", torch.bfloat16)
    assert policy.rule(torch.ops.aten.conv2d.padding) == policy.rules["aten::conv2d.padding"]
    assert policy.rule(torch.ops.aten.mm.default) == policy.rules["aten::mm"]
    assert policy.rule(torch.ops.aten.mm.out) is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_dtype_is_by_default_that_of_autocast(device: str) -> None:
    before = torch.get_autocast_dtype(device)
    try:
        for dtype in (torch.float16, torch.bfloat16):
            torch.set_autocast_dtype(device, dtype)
            assert Policy.native(device).low == dtype
    finally:
        torch.set_autocast_dtype(device, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_autocast_lacks_is_refused_with_the_ones_it_has(dtype: torch.dtype) -> None:
    with pytest.raises(PolicyError, match=r"has no torch\.\w+ mode.*torch\.float16, torch\.bfloat16"):
        Policy.native("cuda", dtype)


@pytest.mark.parametrize("device", ["meta", "cuda:0", "gpu", ""])
def test_a_device_without_autocast_is_refused_with_the_ones_that_have_it(device: str) -> None:
    with pytest.raises(PolicyError, match="'cuda', 'cpu', 'xpu', 'mps', 'mtia'"):
        Policy.native(device)


def test_a_refused_policy_is_a_runtime_error_as_in_torch() -> None:
    assert issubclass(PolicyError, RuntimeError)
    assert issubclass(PolicyError, FxampError)


@pytest.mark.parametrize("device", DEVICES)
def test_the_native_policy_is_made_once(device: str) -> None:
    assert Policy.native(device, torch.float16) is Policy.native(device, torch.float16)


def test_operators_that_the_table_lacks_are_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registered_operators("cpu")
    monkeypatch.setattr(policy_module, "registered_operators", lambda _: known | {"aten::a_new_one"})
    policy_module._native.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"autocasts operators on cpu .*aten::a_new_one") as caught:
            policy = Policy.native("cpu", torch.bfloat16)
        assert caught[0].filename == __file__
        assert policy.rules.keys() == known
    finally:
        policy_module._native.cache_clear()


def test_operators_that_this_torch_lacks_are_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "registered_operators", lambda _: frozenset({"aten::mm"}))
    policy_module._native.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(Policy.native("cpu", torch.bfloat16).rules) == ["aten::mm"]
    finally:
        policy_module._native.cache_clear()


def test_an_operator_that_does_not_exist_is_not_registered() -> None:
    assert not registered("aten::no_such_operator", "cuda")
    with pytest.raises(PolicyError, match="no autocast policy is known for device type 'tpu'"):
        registered("aten::mm", "tpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_policy_is_equal_to_its_copies(device: str) -> None:
    policy = Policy.native(device, torch.bfloat16)
    for same in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert same == policy
        assert hash(same) == hash(policy)
        assert {policy: "found"}[same] == "found"


def test_policies_differ_in_each_of_their_parts() -> None:
    policy = Policy("cpu", torch.float16, {"aten::mm": CPU_ONLY}, "cpu")
    others = {
        Policy("cuda", torch.float16, {"aten::mm": CPU_ONLY}, "cpu"),
        Policy("cpu", torch.bfloat16, {"aten::mm": CPU_ONLY}, "cpu"),
        Policy("cpu", torch.float16, {"aten::bmm": CPU_ONLY}, "cpu"),
        Policy("cpu", torch.float16, {}, "cpu"),
        Policy("cpu", torch.float16, {"aten::mm": CPU_ONLY}, "cuda"),
    }
    assert len(others) == 5
    assert policy not in others


def test_a_policy_keeps_the_rules_it_was_made_with() -> None:
    rules = {"aten::mm": CPU_ONLY}
    policy = Policy("cpu", torch.float16, rules, "cpu")
    rules.clear()
    assert policy.rule("aten::mm") == CPU_ONLY
    with pytest.raises(TypeError, match="item assignment"):
        policy.rules["aten::bmm"] = CPU_ONLY  # type: ignore[index]
    with pytest.raises(AttributeError, match="cannot assign to field"):
        policy.low = torch.bfloat16  # type: ignore[misc]


def test_a_policy_on_another_device_has_the_same_rules_and_remembers_whose_they_are() -> None:
    native = Policy.native("cuda", torch.float16)
    moved = native.on("cpu")
    assert (moved.device_type, moved.low, moved.table) == ("cpu", torch.float16, "cuda")
    assert moved.rules == native.rules
    assert moved != native
    assert moved.on("cuda") == native
    assert native.on("cuda") == native


@pytest.mark.parametrize(
    ("device", "message"), [("cuda:0", "give it the type:  'cuda'"), ("gpu", "knows no")]
)
def test_a_policy_moves_only_to_a_device_type(device: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.native("cpu", torch.bfloat16).on(device)


def test_the_representation_is_one_short_line() -> None:
    policy = Policy("cpu", torch.float16, {"aten::mm": CPU_ONLY}, "cpu")
    assert repr(policy) == "Policy(cpu, torch.float16, 1 rules)"
    assert repr(policy.on("cuda")) == "Policy(cuda by the table of cpu, torch.float16, 1 rules)"
