"""One call, run twice: by eager autocast and converted; what came of each, compared to the bit.

The call gets fresh copies of its arguments each time, under the same seed.  What is compared: whether it
raised, its results (dtype, layout, bits), what it wrote to its arguments, the gradient of every argument
that requires one, and the state of the random numbers afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

import fxamp
from fxamp.policy import Policy

__all__ = ["Call", "Difference", "Outcome", "Tally", "compare", "differences", "run", "same"]


@dataclass(frozen=True)
class Call:
    """A function and its arguments.

    Attributes:
        name: For messages.
        function: What is called.
        args: Its arguments; tensors keep their ``requires_grad``.
        kwargs: Its keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a call: an error, or results; then gradients, or an error of the backward."""

    error: Exception | None = None
    results: tuple[Any, ...] = ()
    arguments: tuple[Tensor, ...] = ()
    backward_error: Exception | None = None
    gradients: tuple[Tensor | None, ...] | None = None
    random: Tensor | None = None


@dataclass(frozen=True)
class Difference:
    """What of a call differs, and how."""

    call: str
    what: str

    def __str__(self) -> str:
        return f"{self.call}: {self.what}"


@dataclass
class Tally:
    """How many calls came to what."""

    forward: int = 0
    backward: int = 0
    raised: int = 0
    eager: list[tuple[str, str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.forward} results equal, {self.backward} with gradients; "
            f"{self.raised} raised on both sides; {len(self.eager)} ran eagerly; "
            f"{len(self.differences)} differ"
        )


def compare(call: Call, policy: Policy, tally: Tally) -> Outcome:
    """Run *call* by eager autocast and converted under *policy*; note in *tally* what came of it.

    Returns:
        What came of it in eager autocast.
    """
    region = torch.autocast(policy.device_type, policy.low)
    eager = run(call, region(call.function))
    amp = fxamp.convert(call.function, policy=policy)
    converted = run(call, amp)
    pieces = amp.report().eager
    found = differences(eager, converted)
    if found:
        tally.differences += [Difference(call.name, what) for what in found]
    elif eager.error is not None:
        tally.raised += 1
    elif pieces:
        tally.eager.append((call.name, pieces[0].reason))
    else:
        tally.forward += 1
        tally.backward += eager.gradients is not None
    return eager


def run(call: Call, function: Callable[..., Any]) -> Outcome:
    """Call *function* on fresh copies of the arguments of *call*."""
    args, kwargs = tree_map(_fresh, (call.args, call.kwargs))
    arguments = tuple(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = tuple(tree_flatten(function(*args, **kwargs))[0])
        except Exception as error:  # noqa: BLE001  the error is what came of it
            return Outcome(error=error)
        try:
            gradients, backward_error = _gradients(results, arguments), None
        except Exception as error:  # noqa: BLE001
            gradients, backward_error = None, error
    return Outcome(None, results, arguments, backward_error, gradients, torch.get_rng_state())


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _gradients(results: tuple[Any, ...], arguments: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
    leaves = [argument for argument in arguments if argument.requires_grad]
    outputs = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    if not leaves or not outputs:
        return None
    random = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=random).to(output.dtype) for output in outputs]
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)


def differences(eager: Outcome, converted: Outcome) -> list[str]:
    """What of the two outcomes is not the same."""
    if eager.error is not None or converted.error is not None:
        return _compare_errors("forward", eager.error, converted.error)
    found = _compare_values("result", eager.results, converted.results)
    found += _compare_values("argument", eager.arguments, converted.arguments)
    found += _compare_errors("backward", eager.backward_error, converted.backward_error)
    found += _compare_values("gradient", eager.gradients or (), converted.gradients or ())
    assert eager.random is not None
    assert converted.random is not None
    if not torch.equal(eager.random, converted.random):
        found.append("another state of the random numbers")
    return found


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two tuples of results have the same dtypes, layouts and bits."""
    return not _compare_values("result", tree_map(_detached, one), tree_map(_detached, other))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _compare_errors(where: str, eager: Exception | None, converted: Exception | None) -> list[str]:
    if eager is None and converted is None:
        return []
    if eager is not None and isinstance(converted, type(eager)):
        return []
    return [f"{where}: eager {_told(eager)}, converted {_told(converted)}"]


def _told(error: Exception | None) -> str:
    return "did not raise" if error is None else f"raised {type(error).__name__}: {str(error)[:300]}"


def _compare_values(what: str, eager: tuple[Any, ...], converted: tuple[Any, ...]) -> list[str]:
    if len(eager) != len(converted):
        return [f"{len(eager)} {what}s, and {len(converted)} converted"]
    pairs = enumerate(zip(eager, converted, strict=True))
    return [f"{what} {index}: {text}" for index, (one, other) in pairs if (text := _compare(one, other))]


def _compare(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{one} and {other}"
    if _kind(one) != _kind(other):
        return f"{_kind(one)} and {_kind(other)}"
    if not _same_bits(one.detach(), other.detach()):
        return f"other bits in {_kind(one)}"
    return ""


def _kind(tensor: Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return f"{tensor.dtype}{list(tensor.shape)} strides {strides} requires_grad={tensor.requires_grad}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether the two hold the same bits, any nan for any nan; signed zeros differ."""
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return torch.equal(one, other)
    same = (one == other) & (torch.signbit(one) == torch.signbit(other))
    return bool((same | (one.isnan() & other.isnan())).all())
