"""Torch's own lists of what autocast does, entry by entry, as torch's tests use them.

Each entry is called as a function and as a method.  The converted call must equal eager autocast to the
bit, gradients too; and both must equal upstream's control, which casts every floating argument to the
dtype that the list names and runs without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_flatten, tree_map

import fxamp
from fxamp.policy import Policy
from tests.conformance import cuda_policy_on_cpu
from tests.conformance.comparison import Call, Tally, compare, run, same

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

LINALG = vars(torch._C)["_linalg"]  # its type stubs lack it

SKIPPED = {
    "cudnn_convolution": "no kernel but cuDNN's",
    "cudnn_convolution_transpose": "no kernel but cuDNN's",
    "einsum": "upstream's entry has the equation where the arguments belong, and its test skips it",
    "equal": "compares two dtypes, which raises on the CPU with and without autocast",
    "__div__": "tensors have no such method in Python 3",
}
CPU_CHECKS, CUDA_CHECKS = 71, 175


@dataclass(frozen=True)
class Entry:
    """A row of a list.

    Attributes:
        op: The name of a function and of a method.
        args: Arguments of it.
        kwargs: Keyword arguments.
        run_as: The dtype that autocast makes it run in.
        out: The dtype of its results.
        module: Where the function is; ``None`` for a method only.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run_as: torch.dtype
    out: torch.dtype
    module: Any = torch

    def variants(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The function and the method, as far as they exist."""
        if self.module is not None and hasattr(self.module, self.op):
            yield "function", getattr(self.module, self.op)
        if hasattr(torch.Tensor, self.op):
            yield "method", getattr(torch.Tensor, self.op)


def entry(
    row: tuple[Any, ...], run_as: torch.dtype, module: Any = torch, out: torch.dtype | None = None
) -> Entry:
    kwargs = row[2] if len(row) > 2 and isinstance(row[2], dict) else {}
    return Entry(row[0], row[1], kwargs, run_as, out or run_as, module)


def cpu_entries(low: torch.dtype) -> list[Entry]:
    torch.manual_seed(0)
    lists = AutocastCPUTestLists("cpu")
    index = {BF16: 1, F16: 2}[low]  # the mixed lists have arguments for both dtypes
    mixed = [*lists.torch_expect_builtin_promote, *lists.methods_expect_builtin_promote]
    return [
        *(entry((row[0], row[index]), F32, module_of(row[0]), row[3]) for row in mixed),
        *(entry(row, low) for row in lists.torch_16),
        *(entry(row, low, torch._C._nn) for row in lists.nn_16),
        *(entry(row, F32) for row in lists.torch_fp32),
        *(entry(row, F32, torch._C._nn) for row in lists.nn_fp32),
        *(entry((row[0], row[index]), F32) for row in lists.torch_need_autocast_promote),
    ]


def cuda_entries(low: torch.dtype) -> list[Entry]:
    torch.manual_seed(0)
    lists = AutocastTestLists("cpu")
    mixed = [*lists.torch_expect_builtin_promote, *lists.methods_expect_builtin_promote]
    return [
        *(entry(row[:2], F32, module_of(row[0]), row[2]) for row in mixed),
        *(entry(row, low) for row in lists.torch_fp16),
        *(entry(row, F32) for row in lists.torch_fp32),
        *(entry(row, F32) for row in lists.torch_need_autocast_promote),
        *(entry(row, low, torch._C._nn) for row in lists.nn_fp16),
        *(entry(row, F32, torch._C._nn) for row in lists.nn_fp32),
        *(entry(row, low, LINALG) for row in lists.linalg_fp16),
        *(entry(row, low, None) for row in lists.methods_fp16),
        *(entry(row, F32, None) for row in lists.methods_fp32),
    ]


def module_of(op: str) -> Any:
    return None if op.startswith("__") else torch


@pytest.mark.parametrize("low", [BF16, F16], ids=str)
def test_every_entry_of_the_cpus_lists_is_eager_autocast(
    low: torch.dtype, count: Callable[[object], None]
) -> None:
    checks, problems = check(cpu_entries(low), Policy.native("cpu", low), nullcontext())
    count(f"{checks} checks")
    assert not problems, "\n".join(problems)
    assert checks == CPU_CHECKS


def test_every_entry_of_the_cuda_lists_is_eager_autocast(count: Callable[[object], None]) -> None:
    policy = cuda_policy_on_cpu.policy(F16)
    checks, problems = check(cuda_entries(F16), policy, cuda_policy_on_cpu.installed())
    count(f"{checks} checks")
    assert not problems, "\n".join(problems)
    assert checks == CUDA_CHECKS


@pytest.mark.parametrize("low", [BF16, F16], ids=str)
def test_a_banned_operator_raises_what_eager_autocast_raises(low: torch.dtype) -> None:
    ((op, args, module),) = AutocastTestLists("cpu").banned
    amp = fxamp.convert(getattr(module, op), policy=cuda_policy_on_cpu.policy(low))
    with cuda_policy_on_cpu.installed():
        with pytest.raises(RuntimeError) as eager, torch.autocast("cpu", low):
            getattr(module, op)(*args)
        with pytest.raises(fxamp.PolicyError) as converted:
            amp(*args)
    assert "unsafe to autocast" in str(eager.value)
    assert "unsafe to autocast" in str(converted.value)


def check(
    entries: list[Entry], policy: Policy, context: AbstractContextManager[None]
) -> tuple[int, list[str]]:
    """How many variants were compared, and what is wrong with them."""
    checks, problems = 0, []
    with context:
        for row in entries:
            if row.op in SKIPPED:
                continue
            for variant, function in row.variants():
                checks += 1
                problems += check_variant(row, f"{row.op} {variant}", function, policy)
    return checks, problems


def check_variant(row: Entry, name: str, function: Callable[..., Any], policy: Policy) -> list[str]:
    args = tree_map(differentiable, row.args)
    call = Call(name, function, args, row.kwargs)
    tally = Tally()
    eager = compare(call, policy, tally)
    problems = [str(difference) for difference in tally.differences]
    problems += [f"{name} runs eagerly: {reason}" for _, reason in tally.eager]
    problems += [f"{name} raises: {eager.error}"] if eager.error is not None else []
    cast_args = tree_map(lambda value: cast(value, row.run_as), args)
    control = run(Call(name, function, cast_args, row.kwargs), function)
    if not same(eager.results, control.results):
        problems.append(f"{name}: other results than with all arguments in {row.run_as}")
    problems += [
        f"{name} gives {value.dtype}, and should give {row.out}"
        for value in tree_flatten(eager.results)[0]
        if isinstance(value, torch.Tensor) and value.dtype is not row.out
    ]
    return problems


def differentiable(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.requires_grad_() if floating else value


def cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().to(dtype) if floating else value
