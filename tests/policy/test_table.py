"""The table against the installed dispatcher: the same operators, treated in the same way."""

import sys
from dataclasses import replace

import pytest
import torch
from torch._C import _dispatch_get_all_op_names

from fxamp.policy import REDISPATCHES, CastPolicy, OpRule
from fxamp.policy.dispatcher import AUTOCAST_KEYS, registered, registered_operators
from fxamp.policy.table import RULES
from tests.policy.probe import Argument, Observed, arguments, observe, overload, region
from tests.policy.wrapper import expected

DEVICES = sorted(AUTOCAST_KEYS)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# Operators that every supported torch has, but not each with an autocast kernel, and why.
VARYING = {
    ("aten::cholesky", "cpu"): "no autocast kernel since 2.14",
    ("aten::rms_norm", "cuda"): "since 2.12",
    ("aten::rms_norm", "xpu"): "since 2.12",
    ("aten::rms_norm", "mtia"): "since 2.12",
    ("aten::_cudnn_rnn", "cuda"): "only in a CUDA build",
}

# Dealt out in turn to the tensor arguments of an operator.
DTYPES = [
    [F32], [F16], [BF16], [F64], [torch.int64], [torch.bool], [torch.complex64], [torch.float8_e4m3fn],
    [F32, F16], [F16, F32], [F32, BF16], [BF16, F32], [F16, BF16], [BF16, F16], [F32, F16, BF16],
    [F64, F32], [F32, F64], [F16, F64], [torch.int64, F32], [F32, torch.int64],
]  # fmt: skip


def rows(device: str) -> list[OpRule]:
    return [row for row in RULES if device in row.devices and registered(row.op, device)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_operator_that_the_dispatcher_autocasts_has_a_row(device: str) -> None:
    table = {row.op for row in RULES if device in row.devices}
    missing = sorted(registered_operators(device) - table)
    assert not missing, f"torch {torch.__version__} autocasts on {device}, the table does not: {missing}"


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_whose_operator_exists_is_one_that_the_dispatcher_autocasts(device: str) -> None:
    table = {row.op for row in RULES if device in row.devices} & set(_dispatch_get_all_op_names())
    extra = sorted(op for op in table - registered_operators(device) if (op, device) not in VARYING)
    assert not extra, f"the table autocasts on {device}, torch {torch.__version__} does not: {extra}"


def test_an_operator_has_one_row_at_most_on_a_device() -> None:
    seen = [(row.op, device) for row in RULES for device in sorted(row.devices)]
    assert len(seen) == len(set(seen))


def test_an_operator_has_one_row_for_each_policy() -> None:
    seen = [(row.op, row.cast, row.why) for row in RULES]
    assert len(seen) == len(set(seen))


def test_every_row_has_a_reason_and_known_devices() -> None:
    for row in RULES:
        assert row.why.strip()
        assert row.devices
        assert row.devices <= AUTOCAST_KEYS.keys()


def test_every_operator_that_appends_a_dtype_has_an_overload_to_call_instead() -> None:
    appending = {row.op for row in RULES if row.cast is CastPolicy.FP32_APPEND_DTYPE}
    assert appending == REDISPATCHES.keys()
    for name, redispatched in REDISPATCHES.items():
        if registered(name, "cuda"):
            assert "dtype" in {argument.name for argument in overload(redispatched)._schema.arguments}


@pytest.mark.parametrize("low", [F16, BF16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_row_casts_as_the_dispatcher_casts(device: str, low: torch.dtype) -> None:
    with region(device, low):
        differences = [
            difference
            for row in rows(device)
            for dtypes in DTYPES
            for difference in compare(row, arguments(overload(row.op), dtypes, [device]), device, low)
        ]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_another_device_pass_through_every_row(device: str) -> None:
    with region(device, F16):
        differences = [
            difference
            for row in rows(device)
            for dtypes in ([F32], [BF16])
            for devices in ([device, "meta"], ["meta", device])
            for difference in compare(row, arguments(overload(row.op), dtypes, devices), device, F16)
        ]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("device", DEVICES)
def test_optional_tensors_that_are_left_out_change_nothing_else(device: str) -> None:
    with region(device, F16):
        differences = [
            difference
            for row in rows(device)
            for difference in compare(
                row, required(arguments(overload(row.op), [F32], [device])), device, F16
            )
        ]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("device", DEVICES)
def test_a_dtype_that_is_given_stays_where_the_row_sets_one(device: str) -> None:
    with region(device, F16):
        for row in rows(device):
            if row.cast is CastPolicy.FP32_SET_OPT_DTYPE:
                op = overload(row.op)
                observed = observe(op, arguments(op, [F32], [device]), {"dtype": F64})
                assert observed == Observed((), row.op, F64)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_without_a_row_are_left_alone(device: str) -> None:
    with region(device, F16):
        for name in (
            "aten::relu",
            "aten::exp_",
            "aten::addmm_",
            "aten::mm.out",
            "aten::mean",
            "aten::where.self",
        ):
            op = overload(name)
            assert observe(op, arguments(op, [F32], [device])) == Observed((), name)


def compare(row: OpRule, tensors: list[Argument], device: str, low: torch.dtype) -> list[str]:
    """What the row says and what the dispatcher does, if they differ."""
    op = overload(row.op)
    given = {}
    if row.cast is CastPolicy.CUDNN_RNN:  # float32 weights are copied by cuDNN, which needs a GPU
        tensors = [replace(each, dtype=F16) if "weight" in each.name else each for each in tensors]
        given = {"weight_stride0": 4, "mode": 2, "proj_size": 0}  # an LSTM with biases
    ours, theirs = expected(row, op, tensors, device, low), observe(op, tensors, given)
    if agree(ours, theirs):
        return []
    dtypes = ", ".join(f"{each.name}: {each.dtype} on {each.device}" for each in tensors)
    return [f"{row.op} on {device} ({row.cast.value}), {dtypes}\n  table: {ours}\n  torch: {theirs}"]


def agree(ours: Observed, theirs: Observed) -> bool:
    if ours.message is not None:
        return (theirs.message or "").startswith(ours.message)
    if sys.platform != "linux":  # C++ leaves the order of evaluation open; GCC goes right to left
        ours, theirs = (replace(each, casts=tuple(sorted(each.casts, key=str))) for each in (ours, theirs))
    return ours == theirs


def required(tensors: list[Argument]) -> list[Argument]:
    return [each for each in tensors if each.kind != "Optional[Tensor]"]
