"""States of autograd that a recording cannot reproduce, and must therefore refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction

from fxamp.errors import CaptureError

__all__ = ["RefusedStates", "saved_tensors_hooks"]


def saved_tensors_hooks() -> Any:
    """The pair of hooks that autograd now packs saved tensors with, or ``None``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003


@dataclass
class RefusedStates:
    """What may not change while a call is recorded; made where the recording begins."""

    _inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    _hooks: object = field(default_factory=saved_tensors_hooks)
    _allowed: set[Any] = field(default_factory=set)

    def allow(self, results: Any) -> None:
        """The custom functions that gave *results* are recorded."""
        tensors = results if isinstance(results, tuple) else (results,)
        self._allowed |= {tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)}

    @property
    def inference(self) -> bool:
        """Whether the call is made in inference mode."""
        return self._inference

    def check_context(self) -> None:
        """Raise ``CaptureError`` if an operator is called in a state that cannot be recorded."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError("a torch.func transform (vmap, grad, ...) is active")
        if torch._C._current_graph_task_id() != -1:
            raise CaptureError("gradients are taken inside forward (autograd.grad or backward)")
        if torch.is_grad_enabled() and saved_tensors_hooks() != self._hooks:
            raise CaptureError("saved-tensor hooks are active (torch.utils.checkpoint)")
        if torch.is_inference_mode_enabled() != self._inference:
            raise CaptureError("forward enters or leaves inference mode")

    def check_history(self, tensor: torch.Tensor) -> None:
        """Raise ``CaptureError`` if *tensor* came to be in a way that an operator does not tell."""
        if tensor._backward_hooks and isinstance(tensor, FakeTensor):
            raise CaptureError("a hook is registered on a tensor inside forward")
        if not tensor.requires_grad or tensor.grad_fn is None:
            return
        if isinstance(tensor.grad_fn, BackwardCFunction) and tensor.grad_fn not in self._allowed:
            name = type(tensor.grad_fn).__name__.removesuffix("Backward")
            raise CaptureError(f"the custom autograd.Function {name} takes part in the gradient")
        if tensor.retains_grad:
            raise CaptureError("retain_grad() is called on a tensor inside forward")

    def check_generators(self, values: tuple[Any, ...]) -> None:
        """Raise ``CaptureError`` if one of *values* is a random generator of the model's own."""
        for value in values:
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                raise CaptureError(
                    "a random generator of the model's own is used, which Python may seed anew"
                )
