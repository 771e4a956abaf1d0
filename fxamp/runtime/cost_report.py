"""``amp.cost()``: what the captured programs cost, and from which size on mixed precision pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule

from fxamp.errors import ArgumentError
from fxamp.ir.cost import Cost, cost_of
from fxamp.ir.device import Device
from fxamp.runtime.runner import Runner

__all__ = ["CostReport", "ProgramCost", "cost_report"]

_LARGEST = 2**24


@dataclass(frozen=True)
class ProgramCost:
    """What one program costs, and what a float32 run of it would."""

    mixed: Cost
    float32: Cost


@dataclass(frozen=True)
class CostReport:
    """What ``amp.cost()`` tells.

    Attributes:
        mixed: The cost of the call that was made last, with its casts.
        float32: That of a float32 run of the same graph.
        programs: Each program that has been captured.
    """

    mixed: Cost
    float32: Cost
    programs: tuple[ProgramCost, ...]

    def speedup(self, device: Device, **sizes: int) -> float:
        """How many times faster than float32 the call is on *device*, by its roofline."""
        self._check(sizes)
        return self.float32.seconds(device, **sizes) / self.mixed.seconds(device, **sizes)

    def break_even(self, device: Device, size: str, **others: int) -> int | None:
        """The smallest value of *size* from which on mixed precision is at least as fast as float32.

        Looked for at the powers of two up to 2**24, and then between the last one that does not pay and the
        next.

        Args:
            device: Where the call would run.
            size: The name of a batch size or sequence length, as in ``mixed.symbols``.
            others: The other sizes.

        Returns:
            The size; 1 if it always pays, ``None`` if it does not even at the largest.

        Raises:
            ArgumentError: A size is missing, or there is none of that name.
        """
        self._check({size: 1, **others})

        def pays(value: int) -> bool:
            return self.speedup(device, **{size: value, **others}) >= 1

        tried: list[int] = [2**power for power in range(_LARGEST.bit_length())]
        losing = [value for value in tried if not pays(value)]
        if not losing:
            return 1
        below = losing[-1]
        if below == _LARGEST:
            return None
        above = 2 * below
        while above - below > 1:
            middle = (above + below) // 2
            below, above = (below, middle) if pays(middle) else (middle, above)
        return above

    def _check(self, sizes: dict[str, int]) -> None:
        names = (*self.mixed.symbols, *self.float32.symbols)
        missing, unknown = sorted({*names} - {*sizes}), sorted({*sizes} - {*names})
        if missing or unknown:
            told = f"missing: {missing}" if missing else f"unknown: {unknown}"
            raise ArgumentError(f"the cost depends on the sizes {sorted({*names})}; {told}")

    def __str__(self) -> str:
        return f"{self.mixed}\n\nin float32: {self.float32}"


def cost_report(runner: Runner) -> CostReport:
    """The report on *runner* and all runners below it.

    Raises:
        LookupError: Nothing has been captured yet.
    """
    runners = runner.tree()
    programs = [program for r in runners for program in r.all_programs()]
    if not programs:
        raise LookupError("no graph has been captured\n  call the model first")
    low = runner.options.policy.low
    costs = {program: _cost(program.modules(), low) for program in programs}
    last = [each for r in runners if r.last is not None for each in r.last.tree() if each in costs]
    mixed, single = Cost(()), Cost(())
    for program in last:
        mixed, single = mixed + costs[program].mixed, single + costs[program].float32
    return CostReport(mixed, single, tuple(costs.values()))


def _cost(modules: Iterable[GraphModule], low: object) -> ProgramCost:
    mixed, single = Cost(()), Cost(())
    for module in modules:
        known = module.meta.get("sizes")
        mixed += cost_of(module, known=known)
        single += cost_of(module, low=low, known=known)  # type: ignore[arg-type]
    return ProgramCost(mixed, single)
