"""Ask the real dispatcher what autocast does to the arguments of an operator.

``observe`` calls the operator inside a region with tensors that have a dtype and a device and
nothing else.  With autograd's keys excluded, what comes below autocast's wrapper reaches
``__torch_dispatch__`` undecomposed: first each cast, as ``aten::to.dtype``, then the operator that
the wrapper calls in the end, which is where the call stops.  No kernel runs, so any device type
can be asked on any machine, and arguments need only fit the schema.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _AutoDispatchBelowAutograd
from torch._ops import OpOverload

__all__ = ["Argument", "Observed", "arguments", "observe", "overload", "region"]


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its name (elements of lists are numbered), schema type, dtype, device."""

    name: str
    kind: str
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Observed:
    """What a wrapper did: the casts in order, then the call it made, or that it raised.

    Attributes:
        casts: The name of each argument that was cast and the dtype it was cast to, in order.
        calls: The name of the operator that the wrapper called; None if it raised.
        dtype: The ``dtype`` argument of that call; None if it has none.
        message: What the wrapper raised, if it did.
    """

    casts: tuple[tuple[str, torch.dtype], ...] = ()
    calls: str | None = None
    dtype: torch.dtype | None = None
    message: str | None = None


class _Reached(Exception):  # noqa: N818  (a way out of the call, not an error)
    def __init__(self, calls: str, dtype: torch.dtype | None) -> None:
        super().__init__(calls)
        self.calls, self.dtype = calls, dtype


class _Probe(torch.Tensor):
    """A tensor of no data that reports each cast and stops at any other operator."""

    argument: str
    casts: list[tuple[str, torch.dtype]]

    @staticmethod
    def make(argument: Argument, casts: list[tuple[str, torch.dtype]]) -> "_Probe":
        probe: _Probe = torch.Tensor._make_wrapper_subclass(
            _Probe, (2, 2), dtype=argument.dtype, device=torch.device(argument.device)
        )
        probe.argument, probe.casts = argument.name, casts
        return probe

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "_Probe":
        if func is not torch.ops.aten.to.dtype:
            raise _Reached(func.name(), _dtype_argument(func, args, kwargs or {}))
        source, dtype = args[0], args[1]
        source.casts.append((source.argument, dtype))
        return cls.make(Argument(source.argument, "Tensor", dtype, source.device.type), source.casts)


def overload(name: str) -> OpOverload:
    """The overload with the name, ``aten::conv2d.padding``."""
    packet, _, suffix = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), suffix or "default")
    return found


def arguments(op: OpOverload, dtypes: list[torch.dtype], devices: list[str]) -> list[Argument]:
    """The tensor arguments of *op*, dtypes and devices dealt out in turn; two to each list."""
    slots = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind in {"Tensor", "Optional[Tensor]"}:
            slots.append((argument.name, kind))
        elif kind in {"List[Tensor]", "List[Optional[Tensor]]"}:
            slots += [(f"{argument.name}[{i}]", kind) for i in range(2)]
    return [
        Argument(name, kind, dtypes[i % len(dtypes)], devices[i % len(devices)])
        for i, (name, kind) in enumerate(slots)
    ]


def observe(op: OpOverload, tensors: list[Argument], given: dict[str, Any] | None = None) -> Observed:
    """What the dispatcher's wrapper does to *op* under the region that is in force.

    Args:
        op: The operator.
        tensors: The tensor arguments; optional ones that are left out are None.
        given: Values for arguments that are not tensors; the others get any value that fits.
    """
    casts: list[tuple[str, torch.dtype]] = []
    probes = {argument.name: _Probe.make(argument, casts) for argument in tensors}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = (given or {}).get(argument.name, _value(argument, probes))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        with _AutoDispatchBelowAutograd():
            op(*args, **kwargs)
    except _Reached as reached:
        return Observed(tuple(casts), reached.calls, reached.dtype)
    except RuntimeError as error:
        return Observed(tuple(casts), message=str(error))
    raise AssertionError(f"{op} came back without a call below autocast")


@contextlib.contextmanager
def region(device_type: str, low: torch.dtype) -> Iterator[None]:
    """Autocast on *device_type* switched on; ``torch.autocast`` refuses devices that are not there."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, low)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def _value(argument: Any, probes: dict[str, _Probe]) -> Any:
    kind, name = str(argument.type), argument.name
    if kind in {"Tensor", "Optional[Tensor]"}:
        return probes.get(name)
    if kind in {"List[Tensor]", "List[Optional[Tensor]]"}:
        return [probes[f"{name}[{i}]"] for i in range(2)]
    if argument.has_default_value():
        return argument.default_value
    # any text would do, but for the name of a dimension, whose type also says "str"
    values = {"int": 1, "float": 1.0, "number": 1.0, "bool": False, "str": "dimname::a"}
    if kind.startswith("List["):
        return [values.get(kind[5:-1], 1)]
    return values.get(kind)


def _dtype_argument(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    names = [argument.name for argument in op._schema.arguments]
    found: torch.dtype | None = {**dict(zip(names, args, strict=False)), **kwargs}.get("dtype")
    return found
