"""Programs in a form that Dynamo traces through: what ``torch.compile`` of a frozen module compiles.

Dynamo runs the module's Python on stand-ins of the arguments.  So the choice of a program must be plain
Python on them, and the rounded weights must be buffers of a module, which CUDA graphs take for static.  A
program fits where its arguments are tensors and constants, it is one graph, it assigns nothing, no kernel in
it consults autocast itself (compilers trace below autocast, where such a kernel finds it off), and it was
captured under ``no_grad``: Dynamo cannot tell whether inference mode is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxamp.capture.structure import Spec
from fxamp.ir.regions import run_in_region
from fxamp.runtime.program import Program

__all__ = ["Traceable", "traceable"]


class Traceable(nn.Module):
    """One program, with the test whether it serves a call.

    Args:
        program: A program of one graph.
        tensors: What it reads.
        positional: For each positional argument ``None`` if it is a tensor, else its value in a tuple.
        keywords: Likewise for the keyword arguments, by name.
        described: Class, device, ``requires_grad`` and so on of each tensor, as in a signature.
    """

    def __init__(
        self,
        program: Program,
        tensors: Sequence[torch.Tensor],
        positional: Sequence[Any],
        keywords: dict[str, Any],
        described: Sequence[Any],
    ) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"tensor_{index}", tensor, persistent=False)
        self.positional, self.keywords = tuple(positional), keywords
        self.dtypes = tuple(described_one[0] for described_one in described)
        self.devices = tuple(described_one[1] for described_one in described)
        self.dims = tuple(described_one[3] for described_one in described)
        self.default_dtype = torch.get_default_dtype()
        self.run: Callable[..., Any] = program.code.run
        self.holds = program.guard.holds
        self.result = program.result
        self.settled: Callable[[], bool] = program.is_settled

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a call that the program serves; ``None`` for any other call."""
        if len(args) != len(self.positional) or list(kwargs) != list(self.keywords):
            return None
        if torch.get_default_dtype() != self.default_dtype:
            return None
        leaves: list[torch.Tensor] = []
        expected = [*self.positional, *self.keywords.values()]
        for value, constant in zip([*args, *kwargs.values()], expected, strict=True):
            if constant is None and isinstance(value, torch.Tensor):
                leaves.append(value)
            elif constant is None or type(value) is not type(constant[0]) or value != constant[0]:
                return None
        for value, dtype, device, dim in zip(leaves, self.dtypes, self.devices, self.dims, strict=True):
            if (
                value.dtype != dtype
                or value.device != device
                or value.dim() != dim
                or not value.is_contiguous()
            ):
                return None
        return leaves if self.holds(leaves) else None

    def forward(self, leaves: list[torch.Tensor]) -> Any:
        """The result of the call with these tensors."""
        outputs = self.run(leaves, tuple(self._buffers.values()))
        return outputs[0] if self.result == ("leaf",) else self.build(outputs)

    def build(self, outputs: Sequence[Any]) -> Any:
        """The outputs in the structure that the model gives them."""
        assert self.result is not None
        return _unflatten_plain(self.result, list(outputs))


def traceable(program: Program, key: Any) -> Traceable | None:
    """*program*, of the signature *key*, for Dynamo; ``None`` if it does not fit."""
    spec, described, aliases, grad, inference = key[:5]
    (_, (args, kwargs)) = spec
    positional = [_constant(part) for part in args[1]]
    keywords = {name: _constant(part) for name, _, part in kwargs[1]}
    parts = [*positional, *keywords.values()]
    plain = not any(part is _OTHER for part in parts) and all(
        one[2] is False and one[4] is True for one in described
    )
    if (
        grad
        or inference
        or not plain
        or aliases not in (None, tuple(range(len(described))))
        or not program.is_plain
        or any(node.target is run_in_region for node in program.module.graph.nodes)
    ):
        return None
    tensors = program.tensors()
    if tensors is None or program.result is None or not _is_plain(program.result):
        return None
    return Traceable(program, tensors, positional, keywords, described)


_OTHER = object()


def _constant(spec: Spec) -> Any:
    """``None`` for a tensor, a tuple of the value for a constant."""
    if spec == ("leaf",):
        return None
    return (spec[3].value,) if spec[0] == "constant" and spec[1] is not float else _OTHER


def _is_plain(result: Spec) -> bool:
    """Whether a result is made of tensors, tuples, lists and dicts."""
    if result == ("leaf",):
        return True
    if result[0] in (tuple, list):
        return all(map(_is_plain, result[1]))
    if result[0] is dict:
        return all(_is_plain(part) for _, _, part in result[1])
    return bool(result[0] == "constant")


def _unflatten_plain(spec: Spec, leaves: list[Any]) -> Any:
    """As ``unflatten``, in terms that Dynamo knows; takes from the front of *leaves*."""
    kind = spec[0]
    if kind == "leaf":
        return leaves.pop(0)
    if kind == "constant":
        return spec[3].value
    if kind is dict:
        return {key: _unflatten_plain(part, leaves) for key, _, part in spec[1]}
    parts = [_unflatten_plain(part, leaves) for part in spec[1]]
    return tuple(parts) if kind is tuple else parts
