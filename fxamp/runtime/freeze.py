"""``freeze``: from a converted model to one that stores each weight in the precision it is used in."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxamp.errors import ArgumentError, FrozenError
from fxamp.ir.rounded_weight import RoundedWeight
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.copy_tree import copy_tree
from fxamp.runtime.frozen_module import FrozenModule
from fxamp.runtime.prepack import Packing, packing_of
from fxamp.runtime.rounding import Uses, uses_in
from fxamp.runtime.runner import Runner
from fxamp.runtime.undo import Undo

__all__ = ["freeze"]


def freeze(
    amp: AmpModule,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    consume: bool = False,
    prepack: str | Packing = "off",
) -> FrozenModule:
    """An inference-only copy of a converted model, whose weights are cast once and stored once.

    A weight that calls only ever cast to one low precision dtype is stored in that dtype alone.  One that is
    used in float32 too (an embedding that is tied to the head) is stored both ways, all others as they are.
    Which those are is read off the programs that *amp* has captured for inference, and off the example.

    What depends on weights and constants alone (a standardised or parametrized weight, joined biases, a table
    of positions) is computed once, with the number of threads and the flags of the back ends of that moment,
    and kept in the dtype that it is used in.  What it is made of stays beside it, in ``state_dict``.

    Args:
        amp: A converted module.
        example_args: Positional arguments of a typical call; not needed if *amp* was called already in
            evaluation mode and without gradients.  A model that reads values of tensors, or runs eagerly in
            part, is run.
        example_kwargs: Keyword arguments of it.
        consume: Take the weights out of *amp* and its model, one by one, instead of copying them.  Both are
            of no use afterwards: calling them raises.  The peak of memory is then that of the float32 model
            and its smallest rounded weight; without, that of the float32 model and the frozen one.
        prepack: ``"auto"`` multiplies by weights in oneDNN's own layout in those linear layers, on the CPU,
            where a check in the first call of a kind shows the same bits and a gain in time.  The packed
            copies take memory beside the plain ones, and ``frozen.prepacked`` tells of each weight what
            became of it.  A :class:`~fxamp.runtime.prepack.Packing` has other bounds.  ``"off"``: never.

    Raises:
        ArgumentError: *amp* is not a converted module, was never called for inference and there is no
            example, or its model cannot be copied; or *prepack* means nothing.
        FrozenError: *amp* was consumed before.

    Example:
        >>> import fxamp
        >>> amp = fxamp.convert(nn.Linear(4, 2), dtype=torch.bfloat16)
        >>> frozen = fxamp.freeze(amp, (torch.ones(3, 4),))
        >>> frozen.state_dict()["weight"].dtype
        torch.bfloat16
    """
    packing = packing_of(prepack)
    source = _source_of(amp)
    example = (tuple(example_args or ()), dict(example_kwargs or {}))
    has_example = example_args is not None or example_kwargs is not None
    with torch.inference_mode(mode=False), torch.no_grad():
        draft = _drafted(source, amp, example) if has_example else None
        uses = uses_in([amp._runner] if draft is None else [amp._runner, draft])
        if not uses.programs and not uses.eager:
            raise ArgumentError(
                "freeze does not know which weights are cast: the model has not been called for inference\n"
                "  give an example:  fxamp.freeze(amp, example_args)\n"
                "  or call it first:  amp.eval(); with torch.no_grad(): amp(...)"
            )
        base = _base(source, draft)
        if consume:  # what cannot be copied is to be told before anything is taken
            copy_tree(base, {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())})
        buffers = _buffers(source, base, consume=consume)
        weights = (_moved if consume else _copied)(source, uses)
        tree = copy_tree(base, weights | buffers).eval()
        if consume:
            _consume(amp, source)
        named = source.named_parameters(remove_duplicate=False)
        unfolded = frozenset(name for name, weight in named if id(weight) in uses.eager)
        frozen = FrozenModule(tree, amp._options, unfolded, packing)
    if has_example:
        frozen.capture(*example[0], **example[1])
    return frozen


def _source_of(amp: AmpModule) -> nn.Module:
    if type(amp) is not AmpModule:
        raise ArgumentError(f"freeze takes what fxamp.convert gives, not {type(amp).__name__}")
    source = amp._source
    if source is not amp._function:
        raise ArgumentError("freeze takes a converted module, and this is a converted function")
    if isinstance(amp._runner, _Consumed):
        amp._runner.refuse()
    if any(map(is_lazy, (*source.parameters(), *source.buffers()))):
        raise ArgumentError("the model has parameters without a shape: call it once, then freeze")
    assert isinstance(source, nn.Module)
    return source


def _drafted(source: nn.Module, amp: AmpModule, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Runner:
    """A runner that has seen the example, on a copy of *source* with the same parameters but own buffers."""
    copied = copy_tree(source, {id(weight): weight for weight in source.parameters()}).eval()
    runner = Runner(copied, "", amp._options)
    runner.capture(*example, amp._region)
    if runner.last is None:
        runner, undo = Runner(copied, "", amp._options), Undo()
        for _ in range(2):  # the first may set attributes, and runs the children of eager pieces eagerly, too
            args, kwargs = _own(example)
            runner(args, kwargs, amp._region)
        undo.restore()
    return runner


def _own(example: Any) -> Any:
    """Copies of the arguments, which a call may write to."""
    try:
        return copy.deepcopy(example)
    except Exception:  # noqa: BLE001  whatever an argument of the user's raises; then it is what is written to
        return example


def _base(source: nn.Module, draft: Runner | None) -> nn.Module:
    """What to copy: the draft, where a first call sets attributes without which no call is captured."""
    if draft is None or not draft.needs_first_call:
        return source
    assert isinstance(draft.function, nn.Module)
    return draft.function


def _buffers(source: nn.Module, base: nn.Module, *, consume: bool) -> dict[int, torch.Tensor]:
    """For the buffers of *base*, those of *source*, which the example has not written to."""
    own = dict(source.named_buffers())
    stored = {name: buffer if consume else buffer.clone() for name, buffer in own.items()}
    return {id(buffer): stored[name] for name, buffer in base.named_buffers() if name in stored}


def _copied(source: nn.Module, uses: Uses) -> dict[int, torch.Tensor]:
    tensors: dict[int, torch.Tensor] = {}
    for weight in source.parameters():
        low = uses.low(weight)
        stored = weight.detach().clone() if low is None else weight.detach().to(low)
        tensors[id(weight)] = _stored(weight, stored, rounded=low is not None)
    return tensors


def _moved(source: nn.Module, uses: Uses) -> dict[int, torch.Tensor]:
    """Small weights first: each one that is rounded makes room for the next."""
    tensors: dict[int, torch.Tensor] = {}
    for weight in sorted(source.parameters(), key=torch.Tensor.numel):
        low = uses.low(weight)
        stored = weight.detach() if low is None else weight.detach().to(low)
        tensors[id(weight)] = _stored(weight, stored, rounded=low is not None)
        weight.grad = None
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return tensors


def _stored(weight: torch.Tensor, stored: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    if rounded:
        return RoundedWeight(stored, requires_grad=weight.requires_grad)
    if stored.is_inference():  # has no version
        stored = stored.clone()
    return nn.Parameter(stored, weight.requires_grad)  # as it was: eager keeps the casts of those that do


def _consume(amp: AmpModule, source: nn.Module) -> None:
    consumed = _Consumed(type(source).__name__)
    amp.__dict__["_runner"] = consumed
    source.__dict__["forward"] = consumed


class _Consumed:
    """In the place of what a consumed model was run by."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Say where the weights have gone."""
        raise FrozenError(
            f"the weights of this {self._name} were moved to the frozen module: freeze(..., consume=True)\n"
            "  call that, or freeze without consume=True, which copies them"
        )

    __call__ = capture = tree = allow = refuse

    @property
    def last(self) -> NoReturn:
        """Likewise."""
        self.refuse()
