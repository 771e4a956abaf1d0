"""One comparison: runs each input in all ways that are asked for, and adds up what they show."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp.compare.comparison import Bits, Comparison, NonFinite
from fxamp.compare.gradients import Gradients
from fxamp.compare.inputs import Item
from fxamp.compare.lockstep import Lockstep
from fxamp.compare.parting import first_difference, steps_of
from fxamp.compare.preserved import preserved
from fxamp.compare.rows import Row
from fxamp.compare.shadows import tensors_in
from fxamp.compare.statistics import Tally, same_bits
from fxamp.compare.subject import Subject
from fxamp.errors import ArgumentError

__all__ = ["REFERENCES", "Loss", "Session"]

REFERENCES = {"float32": torch.float32, "float64": torch.float64}
"""The dtypes that the numbers may be compared with."""

Loss = Callable[..., torch.Tensor]


@dataclass
class Session:
    """Adds up what the inputs show.

    Attributes:
        subject: What is run.
        against: With what it is compared.
        scale: The loss scale; ``None`` without gradients.
        loss: The loss; ``None`` for one of our own.
    """

    subject: Subject
    against: tuple[str, ...]
    scale: float | None
    loss: Loss | None
    inputs: int = 0
    bits: Bits = field(default_factory=lambda: Bits(None))
    outputs: Tally = field(init=False)
    boundaries: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = self.subject.source
        self.outputs = Tally(self.subject.policy.low)
        names: dict[int, str] = {}
        if isinstance(source, nn.Module):
            named = (*source.named_parameters(), *source.named_buffers())
            self._held = [tensor for _, tensor in named]  # keeps the ids alive
            names = {id(tensor): name for name, tensor in reversed(named)}
        self.names = names
        self.gradients = Gradients(self.scale) if self.scale is not None else None
        self.locksteps: dict[str, Lockstep] = {}
        for name in self.against:
            if name in REFERENCES:
                first = not self.locksteps
                self.locksteps[name] = Lockstep(
                    source,
                    REFERENCES[name],
                    names,
                    self.subject.policy.low,
                    gradients=self.gradients if first else None,
                    local=first,
                )

    def run(self, index: int, item: Item) -> None:
        """Run one input in all ways."""
        self.inputs += 1
        call, converted = self._prepare(item)
        own: list[Any] | None = None
        for name, lockstep in self.locksteps.items():
            own = self._lockstep(name, lockstep, index, item, call)
        if "autocast" in self.against and self.bits.equal is not False:
            substituted = any(lockstep.substituted for lockstep in self.locksteps.values())
            eager = own if call == self.subject.eager and not substituted else None
            self._compare_bits(index, item, eager, converted)

    def _prepare(self, item: Item) -> tuple[Callable[[Item], Any], list[Any] | None]:
        """What is run in lockstep, and the results of the converted model if that is what it is."""
        subject = self.subject
        if not subject.converted:
            return subject.eager, None
        try:
            converted = self._plain(subject.rewritten, item)  # captures, too
            if subject.amp.eager_modules:
                converted = self._plain(subject.rewritten, item)  # captures the modules below
        except Exception as error:
            if not subject.has_eager_twin:
                raise
            self.notes[f"converted the model raises, so eager autocast was run: {_first_line(error)}"] = None
            return subject.eager, None
        return subject.rewritten, converted

    def _mode(self) -> AbstractContextManager[Any]:
        return torch.enable_grad() if self.scale is not None else torch.no_grad()

    def _plain(self, call: Callable[[Item], Any], item: Item) -> list[Any]:
        """The result of an ordinary run, as leaves."""
        with preserved(self.subject.source, (item.args, item.kwargs)), self._mode():
            return _leaves(call(item))

    # --- numbers ------------------------------------------------------------------------------------

    def _lockstep(
        self, name: str, lockstep: Lockstep, index: int, item: Item, call: Callable[[Item], Any]
    ) -> list[Any] | None:
        subject = self.subject
        first = lockstep is next(iter(self.locksteps.values()))
        arguments = (item.args, item.kwargs)
        try:
            with preserved(subject.source, arguments, copies=False) as undo:
                lockstep.begin(index, undo)
                wanted = first and self.scale is not None
                with self._mode() if first else torch.no_grad():
                    with lockstep.watching():
                        result = call(item)
                    losses = self._losses(lockstep, result, item) if wanted else None
                leaves = _leaves(result)
                if first:
                    self._measure(leaves, [lockstep.value_of(leaf) for leaf in leaves if _is_tensor(leaf)])
                if losses is not None:
                    self._backward(lockstep, index, losses)
                return [leaf.detach() if _is_tensor(leaf) else leaf for leaf in leaves]
        except ArgumentError:
            raise
        except Exception as error:  # noqa: BLE001  a fault of ours must not keep the plain answer back
            own = self._plain(call, item)  # raises where the model itself is at fault
            self._at_boundaries(name, own, item, error)
            return own

    def _measure(self, leaves: list[Any], values: list[torch.Tensor]) -> None:
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.is_floating_point() and tensor.shape == value.shape and tensor.layout is torch.strided:
                self.outputs.add(tensor, value)

    def _at_boundaries(self, name: str, own: list[Any], item: Item, error: Exception) -> None:
        """Compare the results with those of a plain run without autocast."""
        self.boundaries[f"the model against {name} ({_first_line(error)})"] = None
        if name != "float32":
            return
        expected = self._plain(lambda item: self.subject.source(*item.args, **item.kwargs), item)
        if len(own) == len(expected):
            pairs = [(o, e) for o, e in zip(own, expected, strict=True) if _is_tensor(o) and _is_tensor(e)]
            self._measure([o for o, _ in pairs], [e for _, e in pairs])

    # --- gradients ----------------------------------------------------------------------------------

    def _losses(
        self, lockstep: Lockstep, result: Any, item: Item
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The loss of the run and that of the reference."""
        if self.loss is None:
            floats = [leaf for leaf in _leaves(result) if _is_tensor(leaf) and leaf.is_floating_point()]
            value = _projection(floats)
            other = _projection([lockstep.value_of(leaf) for leaf in floats])
        else:
            with lockstep.watching():
                labels = item.rest if _takes_labels(self.loss) else ()
                value = self.loss(result, *labels)
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(f"the loss gives a {type(value).__name__}, not a tensor")
            other = lockstep.value_of(value)
        if not value.requires_grad or not other.requires_grad:
            self.notes["no gradients: the loss does not depend on anything that requires them"] = None
            return None
        return value, other

    def _backward(self, lockstep: Lockstep, index: int, losses: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert self.gradients is not None
        gradients = self.gradients
        gradients.input, gradients.order = index, max(gradients.order, lockstep.order)
        pairs = [pair for pair in lockstep.shadows.leaves if pair[0].is_floating_point()]
        leaves = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        scale = torch.full_like(losses[0], gradients.scale)
        try:
            found = torch.autograd.grad(
                losses,
                leaves,
                (scale, torch.ones_like(losses[1])),
                allow_unused=True,
                materialize_grads=False,
            )
        except RuntimeError as error:
            self.notes[f"no gradients: {str(error).splitlines()[0]}"] = None
            return
        half = len(pairs)
        for (tensor, _), one, other in zip(pairs, found[:half], found[half:], strict=True):
            count = lockstep.leaf_count(self.names.get(id(tensor), "an input"))
            gradients.leaf(one, other, count)

    # --- bits ---------------------------------------------------------------------------------------

    def _compare_bits(
        self, index: int, item: Item, eager: list[Any] | None, converted: list[Any] | None
    ) -> None:
        subject = self.subject
        if not subject.has_eager_twin:
            policy = subject.policy
            self.bits = Bits(
                None, f"there is no eager autocast by the table of {policy.table} on {policy.device_type}"
            )
            return
        try:
            eager = self._plain(subject.eager, item) if eager is None else eager
        except Exception as error:  # noqa: BLE001  only in lockstep there was a way on
            self.bits = Bits(None, f"eager autocast raises {_first_line(error)}")
            return
        try:
            converted = self._plain(subject.rewritten, item) if converted is None else converted
        except Exception as error:  # noqa: BLE001  what the conversion does is what is asked
            self.bits = Bits(equal=False, detail=f"converted it raises {_first_line(error)}")
            return
        place = _differing(eager, converted)
        if place is None:
            self.bits = Bits(equal=True, detail=self._eager_parts())
            return
        with self._mode():
            with preserved(subject.source, (item.args, item.kwargs)):
                expected = steps_of(subject.source, lambda: subject.eager(item))
            with preserved(subject.source, (item.args, item.kwargs)):
                run = steps_of(subject.source, lambda: subject.rewritten(item))
        site = first_difference(run, expected)
        where = f"they part at {site.op} ({site.where})" if site else "no operator's result differs"
        self.bits = Bits(equal=False, detail=f"input {index}: {place}; {where}")

    def _eager_parts(self) -> str:
        parts = [name or "the model" for name in self.subject.amp.eager_modules]
        return f"eager parts: {', '.join(parts)}" if parts else ""

    # --- the end ------------------------------------------------------------------------------------

    def result(self) -> Comparison:
        """What was found."""
        main = next(iter(self.locksteps.values()), None)
        others = list(self.locksteps.values())[1:]
        rows: tuple[Row, ...] = ()
        first = None
        if main is not None:
            wide = {site: count.arrived.read() for other in others for site, count in other.counts.items()}
            read = {count: count.read(wide.get(site)) for site, count in main.counts.items()}
            rows = tuple(row for row in read.values() if row.arrived.count or row.gradient or row.findings)
            if main.first is not None:
                first = NonFinite(read[main.first[0]], main.first[1])
            if main.cut is not None:
                self.notes[
                    f"gradients are compared from {main.cut.op} ({main.cut.where}) on, not before it"
                ] = None
        how = "converted" if self.subject.converted else "eager autocast"
        return Comparison(
            what=f"{how}, {self.subject.policy}",
            reference=next(iter(self.locksteps), ""),
            bits=self.bits,
            rows=rows,
            outputs=self.outputs.read() if self.outputs.count else None,
            first_nonfinite=first,
            inputs=self.inputs,
            boundaries=tuple(self.boundaries),
            apart=tuple((f"{site.op} ({site.where})", why) for site, why in main.apart.items())
            if main
            else (),
            loss_scale=self.scale,
            notes=tuple(self.notes),
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _leaves(result: Any) -> list[Any]:
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(result):
        state = getattr(leaf, "__dict__", None)
        if not isinstance(leaf, torch.Tensor) and isinstance(state, Mapping):  # an object of the model's own
            leaves += tensors_in(dict(state))
        else:
            leaves.append(leaf)
    return leaves


def _projection(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number on which each element has another influence: a plain sum of probabilities has no gradient."""
    total = torch.zeros(())
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        weights = torch.arange(tensor.numel(), device=tensor.device, dtype=wide).cos()
        total = total.to(tensor.device) + (tensor.to(wide).reshape(-1) * weights).sum()
    return total


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _differing(one: list[Any], other: list[Any]) -> str | None:
    if len(one) != len(other):
        return f"{len(other)} results instead of {len(one)}"
    for index, (expected, found) in enumerate(zip(one, other, strict=True)):
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            if not same_bits(expected, found):
                return f"result {index} differs"
        elif isinstance(expected, torch.Tensor) or isinstance(found, torch.Tensor):
            return f"result {index} is of another type"
    return None


def _takes_labels(loss: Loss) -> bool:
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True
    return len(parameters) > 1 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
