"""How long does converting a model take, beside ``torch.export.export`` of the same model?

Part one, models: seconds of CPU time for ``torch.export.export`` (not strict, the same example inputs) and
for ``fxamp.convert``, like compared with like: all sizes fixed, and a symbolic batch.  The last pair of
columns is ``convert`` as it is by default, where every size is symbolic that the model allows.  All variants
are timed one after the other in each round; printed are the medians, and the first round by itself, in which
torch and fxamp meet each operator for the first time.

Part two, scaling: a chain and a wide graph of 1,000, 10,000 and 100,000 operators; milliseconds an operator,
whole and by phase.  They stay the same if the time is linear.

    python benchmarks/convert_time.py [--rounds 5] [--only resnet] [--largest 10000] [--export]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxamp
from fxamp.passes.base import Pass
from fxamp.runtime import program, runner

DTYPE = torch.bfloat16
SIZES = (1_000, 10_000, 100_000)


@dataclass(frozen=True)
class Case:
    """A model and the arguments of one call."""

    name: str
    model: nn.Module
    args: tuple[Tensor, ...]


# --- models -------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Three levels, two convolutions a level each way, joined across."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(self._level, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(self._level(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _level(inputs: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 3, height, width."""
        held = []
        for level in self.down:
            x = level(nn.functional.max_pool2d(x, 2) if held else x)
            held.append(x)
        held.pop()
        for level in reversed(self.up):
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), held.pop()], dim=1))
        result: Tensor = self.head(x)
        return result


def _mlp() -> Case:
    layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return Case("mlp 10x64", nn.Sequential(*layers), (torch.randn(4, 64),))


def _unet() -> Case:
    return Case("U-Net, 3 levels", UNet(), (torch.randn(2, 3, 32, 32),))


def _resnet18() -> Case:
    from torchvision.models import resnet18  # noqa: PLC0415

    return Case("resnet18", resnet18(), (torch.randn(2, 3, 64, 64),))


def _vit() -> Case:
    import timm  # noqa: PLC0415

    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    return Case("vit tiny", model, (torch.randn(2, 3, 64, 64),))


def _convnext() -> Case:
    import timm  # noqa: PLC0415

    return Case("convnext atto", timm.create_model("convnext_atto"), (torch.randn(2, 3, 64, 64),))


_TEXT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}


def _bert() -> Case:
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    return Case("bert, 4 layers", BertModel(BertConfig(vocab_size=100, **_TEXT)), (_tokens(),))


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, use_cache=False, **_TEXT)
    return Case("llama, 4 layers", LlamaForCausalLM(config), (_tokens(),))


def _tokens() -> Tensor:
    return torch.randint(0, 100, (2, 16))


def cases(only: str) -> Iterator[Case]:
    """The models whose names contain *only*, as far as their libraries are installed."""
    for make in (_mlp, _resnet18, _vit, _convnext, _unet, _bert, _llama):
        if only not in make.__name__:
            continue
        try:
            yield make()
        except ImportError as error:
            print(f"{make.__name__[1:]} left out: {error}")


# --- one against the other ----------------------------------------------------------------------------


def export(case: Case, *, batch: bool) -> None:
    """Export, with a symbolic first dimension of every argument if *batch*."""
    sizes = tuple({0: torch.export.Dim("batch", min=2)} for _ in case.args) if batch else None
    torch.export.export(case.model, case.args, dynamic_shapes=sizes, strict=False)


def convert(case: Case, sizes: Any) -> fxamp.runtime.amp_module.AmpModule:
    """Convert and capture.

    A model that reads values of tensors is captured at its first call; the call is part of the time then.
    """
    amp = fxamp.convert(case.model, case.args, dtype=DTYPE, dynamic_shapes=sizes)
    if not amp.graph_modules:
        amp(*case.args)
    return amp


def _batch(case: Case) -> Any:
    return tuple({0: torch.export.Dim("batch", min=2)} for _ in case.args)


def seconds(work: Callable[[], object]) -> float:
    """CPU time of *work*; ``nan`` if it fails."""
    start = time.process_time()
    try:
        work()
    except Exception as error:  # noqa: BLE001  export refuses some models
        print(f"  {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return float("nan")
    return time.process_time() - start


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds in every round, by variant."""
    variants: dict[str, Callable[[], object]] = {
        "export": lambda: export(case, batch=False),
        "fixed": lambda: convert(case, sizes=False),
        "export batch": lambda: export(case, batch=True),
        "batch": lambda: convert(case, _batch(case)),
        "default": lambda: convert(case, None),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, work in variants.items():
            times[name].append(seconds(work))
    return times


def models_table(only: str, rounds: int) -> Table:
    """Part one."""
    table = Table(title="seconds; ratio = convert / export")
    for title in ("model", "operators", "export", "convert", "ratio", "export, batch", "convert, batch"):
        table.add_column(title)
    for title in ("ratio", "convert, default", "/ export", "/ export, batch", "first round: ratios"):
        table.add_column(title)
    for case in cases(only):
        case.model.eval()
        times = measure(case, rounds)
        middle = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        first = {name: taken[0] for name, taken in times.items()}
        print(case.name, {name: round(taken, 3) for name, taken in middle.items()}, flush=True)
        amp = convert(case, None)
        count = sum(node.op == "call_function" for module in amp.graph_modules for node in module.graph.nodes)
        table.add_row(
            case.name,
            f"{count}{' eager: ' + str(amp.eager_modules) if amp.eager_modules else ''}",
            f"{middle['export']:.3f}",
            f"{middle['fixed']:.3f}",
            f"{middle['fixed'] / middle['export']:.2f}",
            f"{middle['export batch']:.3f}",
            f"{middle['batch']:.3f}",
            f"{middle['batch'] / middle['export batch']:.2f}",
            f"{middle['default']:.3f}",
            f"{middle['default'] / middle['export']:.2f}",
            f"{middle['default'] / middle['export batch']:.2f}",
            f"{first['fixed'] / first['export']:.2f}, {first['batch'] / first['export batch']:.2f}",
        )
    return table


# --- scaling ------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """A chain of *operators* operators, four a step: linear, relu, multiplication, addition."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.steps = operators // 4
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

    def step(self, index: int, x: Tensor) -> Tensor:
        """One step."""
        return torch.relu(self.layers[index % 16](x)) * 0.5 + x

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 8."""
        for index in range(self.steps):
            x = self.step(index, x)
        return x


class Wide(Chain):
    """As many operators side by side, joined at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 8."""
        return torch.cat([self.step(index, x) for index in range(self.steps)])


@contextmanager
def phases(times: dict[str, float]) -> Iterator[None]:
    """Add up the CPU time of each phase of a conversion in *times*."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                times[name] = times.get(name, 0.0) + time.process_time() - start

        return call

    def run_pass(step: Pass, module: torch.fx.GraphModule, run: Any = Pass.__call__) -> bool:
        return bool(timed(step.name, run)(step, module))

    with ExitStack() as stack:
        stack.enter_context(patch.object(runner, "capture", timed("record", runner.capture)))
        stack.enter_context(patch.object(program, "lower", timed("lower and compile", program.lower)))
        stack.enter_context(patch.object(Pass, "__call__", run_pass))
        yield


def scaling_table(largest: int, *, with_export: bool) -> Table:
    """Part two."""
    columns: dict[str, dict[str, float]] = {}
    convert(Case("", Chain(400), (torch.randn(4, 8),)), None)
    for kind in (Chain, Wide):
        for sizes, label in ((False, "fixed"), (None, "symbolic")):
            for count in SIZES:
                if count > largest:
                    continue
                case = Case("", kind(count), (torch.randn(4, 8),))
                times: dict[str, float] = {}
                with phases(times):
                    made: list[Any] = []
                    times["all"] = seconds(lambda: made.append(convert(case, sizes)))  # noqa: B023
                times["first call"] = seconds(lambda: made[0](*case.args))  # noqa: B023
                times["second call"] = seconds(lambda: made[0](*case.args))  # noqa: B023
                if with_export:
                    times["export"] = seconds(lambda: export(case, batch=label == "symbolic"))  # noqa: B023
                name = f"{kind.__name__.lower()} {label} {count // 1000}k"
                columns[name] = {phase: taken / count * 1e3 for phase, taken in times.items()}
                print(f"{name}: {times['all']:.1f} s", flush=True)
    table = Table("milliseconds an operator", *columns)
    for phase in dict.fromkeys(phase for column in columns.values() for phase in column):
        table.add_row(phase, *(f"{column.get(phase, float('nan')):.4f}" for column in columns.values()))
    return table


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each variant, after a first one")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--part", choices=["models", "scaling"], help="one part alone")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="largest graph of the scaling")
    parser.add_argument("--export", action="store_true", help="export the large graphs, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console(width=220)
    if options.part != "scaling":
        console.print(models_table(options.only, options.rounds))
    if options.part != "models":
        console.print(scaling_table(options.largest, with_export=options.export))


if __name__ == "__main__":
    main()
