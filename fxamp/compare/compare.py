"""``fxamp.compare``: which operator loses the accuracy, where Inf comes from, and are the bits eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxamp.compare.comparison import Comparison
from fxamp.compare.inputs import count_of, items_of
from fxamp.compare.progress import progress_over
from fxamp.compare.session import REFERENCES, Loss, Session
from fxamp.compare.subject import subject_of
from fxamp.errors import ArgumentError
from fxamp.policy import Policy
from fxamp.runtime.amp_module import AmpModule

__all__ = ["compare"]


def compare(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    against: Sequence[str] = ("autocast", "float32"),
    *,
    backward: bool = False,
    loss: Loss | None = None,
    loss_scale: float | None = None,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    policy: Policy | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Run *model* under autocast beside references, and tell operator by operator how far they are apart.

    Neither the model nor its buffers, gradients or random state are changed; every input starts from the
    state that the model has.

    Args:
        model: A module or a function, or what :func:`fxamp.convert` made of one, which is run as converted.
        inputs: A tensor, a tuple of arguments or a dict of keyword arguments for one call; a list or a
            loader of these for many.
        against: ``"autocast"``: are the bits of the converted model those of eager autocast?  ``"float32"``,
            ``"float64"``: the numbers.  The first of these two ranks the operators.
        backward: Whether to compare gradients.
        loss: ``loss(result)``, or ``loss(result, labels)`` with what the items of *inputs* have beyond the
            model's parameters; called outside of autocast.  By default a sum of the results, weighted.
        loss_scale: What the loss is multiplied by in the run; taken out of its gradients again.  By default
            the scale of ``amp.scaler`` where it has been used, else 1.
        device_type: As for :func:`fxamp.convert`; of a converted model its own.
        dtype: Likewise.
        policy: Likewise; a model that is not converted is run by eager autocast if none is given.
        progress: Whether to show a bar over many inputs; by default on a terminal.

    Raises:
        ArgumentError: An argument does not fit.

    Example:
        >>> found = compare(nn.Linear(8, 4), torch.ones(2, 8), dtype=torch.bfloat16)
        >>> found.bits.equal, found.worst(1)[0].op
        (True, 'aten::linear')
    """
    unknown = [name for name in against if name not in ("autocast", *REFERENCES)]
    if unknown or isinstance(against, str) or not against:
        raise ArgumentError(
            f"against is a sequence of 'autocast', 'float32' and 'float64', not {against!r}\n"
            "  for example:  against=('autocast', 'float32')"
        )
    if loss is not None and not backward:
        raise ArgumentError("a loss is there for gradients\n  ask for them:  backward=True")
    count = count_of(inputs)
    subject = subject_of(model, device_type, dtype, policy, once=count == 1)
    scale = _loss_scale(model, loss_scale) if backward else None
    session = Session(subject, tuple(against), scale, loss)
    for index, item in enumerate(progress_over(items_of(inputs, subject.source), count, show=progress)):
        session.run(index, item)
    return session.result()


def _loss_scale(model: object, scale: float | None) -> float:
    if scale is None:
        # a scaler that was never asked for has scaled nothing
        scaler = model.__dict__.get("scaler") if type(model) is AmpModule else None
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
    if not scale > 0:
        raise ArgumentError(f"loss_scale is a positive number, not {scale}")
    return float(scale)
