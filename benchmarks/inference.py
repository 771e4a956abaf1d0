"""What does inference cost: a frozen module beside eager autocast and the other ways to low precision.

============  ================================================================================
float32       the model as it is
autocast      eager autocast, a region entered for every call: what all ratios are relative to
held open     one region of eager autocast around all calls, which keeps the casts of weights
              (and goes on using them when the weights change; not in inference mode)
low           ``model.to(low)``, inputs too: other bits, the floor for plain eager code
fxamp         ``fxamp.convert(model)``, which casts the weights on every call
frozen        ``fxamp.freeze`` of it
packed        ``fxamp.freeze(..., prepack="auto")``; left out where no weight is packed, with the reason
compiled      ``torch.compile(model)`` under autocast (inductor: other bits)
c. frozen     ``torch.compile(frozen)``
============  ================================================================================

Each round calls all contenders one after the other, in alternating order; ratios are taken within a round,
and their median and quartiles printed, of the CPU time of this thread.  Counted, not measured: casts and
operators that the dispatcher sees in a call (views left out), and the peak of bytes: weights, and what a call
has alive at once.  "same bits" compares all results with those of eager autocast.  A CPU without AVX512 has
no fast convolutions in bfloat16, so ``--longest`` leaves out models by the time of one call, and says so.

    python benchmarks/inference.py [--models gpt mlp] [--contenders autocast frozen] [--dtype float16]
                                   [--mode inference] [--rounds 21] [--seconds 0.05] [--longest 5]
                                   [--json FILE] [--list]

A run with ``--json`` adds its results to those in the file, so it can be made in pieces.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from inference_models import MODELS, Case, make
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxamp
from tests.live_bytes import LiveBytes

CONTENDERS = ("float32", "autocast", "held open", "low", "fxamp", "frozen", "packed", "compiled", "c. frozen")
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes:
        name: One of the table above.
        module: What holds the weights.
        call: Makes one call.
        around: What is around all calls.
        compiled: Whether the dispatcher sees nothing of it.
    """

    name: str
    module: nn.Module
    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    compiled: bool = False


@dataclass
class Result:
    """What was found about one contender on one model.

    Attributes:
        times: Seconds of a call, by round.
        ratios: Of these to eager autocast's, by round.
        gains: Of these to the frozen module's, by round, for a packed one.
        bits: Whether the results are those of eager autocast.
        operators: How many the dispatcher sees; -1 where that is not known.
        casts: How many of them change a floating dtype; likewise.
        peak: Bytes; likewise.
    """

    model: str
    contender: str
    dtype: str
    mode: str
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    bits: bool = False
    operators: int = -1
    casts: int = -1
    peak: int = -1


class Counts(TorchDispatchMode):
    """Counts operators and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        # in inference mode a cast arrives as aten::to, and may be none
        is_cast = func.name().startswith(("aten::_to_copy", "aten::to.")) and result.dtype != args[0].dtype
        self.operators += is_cast or not (is_view or func.name().startswith("aten::detach"))
        self.casts += is_cast
        return result


def contenders(case: Case, names: Sequence[str], low: torch.dtype) -> list[Contender]:
    """Those that are asked for, on the weights of *case*."""
    return [_contender(name, case, low) for name in names]


def _contender(name: str, case: Case, low: torch.dtype) -> Contender:
    model, args = case.model, case.args
    cached = tuple(arg.to(low) if index in case.cached else arg for index, arg in enumerate(args))
    if name == "float32":
        return Contender(name, model, lambda: model(*args))
    if name == "low":
        narrow = copy.deepcopy(model).to(low)
        inputs = tuple(arg.to(low) if arg.is_floating_point() else arg for arg in args)
        return Contender(name, narrow, lambda: narrow(*inputs))
    if name == "held open":
        return Contender(name, model, lambda: model(*cached), lambda: torch.autocast("cpu", dtype=low))
    if name in ("autocast", "compiled"):
        call = model if name == "autocast" else torch.compile(model)
        return Contender(name, model, _under_autocast(call, cached, low), compiled=name == "compiled")
    module: Any = fxamp.convert(model, dtype=low)
    if name != "fxamp":
        module = fxamp.freeze(module, cached, prepack="auto" if name == "packed" else "off")
    call = torch.compile(module) if name == "c. frozen" else module
    return Contender(name, module, lambda: call(*cached), compiled=name == "c. frozen")


def _under_autocast(
    call: Callable[..., Any], args: tuple[Tensor, ...], low: torch.dtype
) -> Callable[[], Any]:
    def step() -> Any:
        with torch.autocast("cpu", dtype=low):
            return call(*args)

    return step


# --- one model ----------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], calls: int) -> float:
    """CPU time of this thread for one call, the mean of *calls*."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def results_of(name: str, options: argparse.Namespace) -> list[Result]:
    """Everything about one model."""
    low, mode = getattr(torch, options.dtype), MODES[options.mode]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = make(name)
        torch.compiler.reset()
        with mode():
            start = time.perf_counter()
            expected = _tensors(_contender("autocast", case, low).call())
            taken = time.perf_counter() - start
            if taken > options.longest:
                print(f"left out: {name}, {options.dtype}: a call of eager autocast takes {taken:.1f} s\n")
                return []
            all_of_them = contenders(case, [n for n in options.contenders if n != "packed"], low)
            if "packed" in options.contenders:
                all_of_them += _packed(case, low)
            found = [_examined(name, each, expected, options) for each in all_of_them]
            _measure(all_of_them, found, options.rounds, options.seconds)
    return found


def _packed(case: Case, low: torch.dtype) -> list[Contender]:
    """The frozen module with packed weights, if there are any."""
    contender = _contender("packed", case, low)
    _warm(contender)
    rows = contender.module.prepacked
    if any(row.packed for row in rows):
        return [contender]
    reasons = dict.fromkeys(row.why for row in rows)
    print("left out: packed:", "; ".join(reasons) or "no linear layer reads a rounded weight")
    return []


def _warm(contender: Contender) -> Any:
    with contender.around():
        for _ in range(2):
            contender.call()
        return contender.call()


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _examined(name: str, contender: Contender, expected: list[Tensor], options: argparse.Namespace) -> Result:
    found = _tensors(_warm(contender))
    result = Result(name, contender.name, options.dtype, options.mode)
    result.bits = all(map(_same, found, expected)) and len(found) == len(expected)
    if not contender.compiled:
        counts, live = Counts(), LiveBytes()
        with contender.around():
            contender.call()  # the first one in a region that is held open casts the weights
            with counts:
                contender.call()
        for tensor in (
            *contender.module.parameters(),
            *contender.module.buffers(),
            *_copies(contender.module),
        ):
            live._note(tensor, new=True)
        with ExitStack() as stack:
            stack.enter_context(contender.around())
            stack.enter_context(live)
            contender.call()
        result.operators, result.casts, result.peak = counts.operators, counts.casts, live.peak
        if isinstance(contender.module, fxamp.FrozenModule):
            result.peak += contender.module._weights.packed_bytes()
    return result


def _copies(module: nn.Module) -> list[Tensor]:
    """What a frozen module stores besides its parameters."""
    return module._weights.copies() if isinstance(module, fxamp.FrozenModule) else []


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _measure(these: list[Contender], results: list[Result], rounds: int, budget: float) -> None:
    eager = next(each for each in these if each.name == "autocast")
    calls = max(1, int(budget / max(seconds(eager.call, 3), 1e-6)))
    pairs = list(zip(these, results, strict=True))
    for index in range(rounds):
        for contender, result in pairs if index % 2 else reversed(pairs):
            with contender.around():
                contender.call()
                result.times.append(seconds(contender.call, calls))
        reference = next(result.times[-1] for each, result in pairs if each is eager)
        frozen = next((result.times[-1] for each, result in pairs if each.name == "frozen"), None)
        for each, result in pairs:
            result.ratios.append(result.times[-1] / reference)
            if each.name == "packed" and frozen is not None:
                result.gains.append(result.times[-1] / frozen)


# --- what is printed ----------------------------------------------------------------------------------


def show(results: list[Result]) -> None:
    """Print a table a model."""
    console = Console(width=110)
    for key in dict.fromkeys((r.model, r.dtype, r.mode) for r in results):
        these = [r for r in results if (r.model, r.dtype, r.mode) == key]
        gains = any(result.gains for result in these)
        packed = ["/ frozen"] if gains else []
        table = Table("contender", "us", "/ autocast", *packed, "same bits", "casts", "operators", "peak MB")
        for result in these:
            known = result.operators >= 0
            table.add_row(
                result.contender,
                f"{statistics.median(result.times) * 1e6:.1f}",
                _spread(result.ratios),
                *([_spread(result.gains)] if gains else []),
                "yes" if result.bits else "no",
                *((str(result.casts), str(result.operators), f"{result.peak / 1e6:.2f}") if known else ()),
            )
        console.print(", ".join(key))
        console.print(table)


def _spread(ratios: list[float]) -> str:
    """The median and the quartiles."""
    if not ratios:
        return ""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[""], help="those whose names contain one of these")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--mode", default="no_grad", choices=tuple(MODES))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.05, help="of eager autocast, in each round")
    parser.add_argument("--longest", type=float, default=5.0, help="seconds of a call of eager autocast")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    options = parser.parse_args()
    options.contenders = [name for name in CONTENDERS if name in {*options.contenders, "autocast"}]
    return options


def main() -> None:
    """Measure what is asked for and print it."""
    options = _options()
    torch.set_num_threads(1)
    names = [name for name in MODELS if any(part in name for part in options.models)]
    if options.list:
        print(*names, sep="\n")
        return
    for name in names:
        results = results_of(name, options)
        show(results)
        if options.json and results:
            known = json.loads(options.json.read_text()) if options.json.exists() else []
            options.json.write_text(json.dumps([*known, *map(asdict, results)], indent=1))


if __name__ == "__main__":
    main()
