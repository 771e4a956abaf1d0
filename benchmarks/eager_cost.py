"""Does a converted model ever cost more than eager autocast?

For small models on the CPU, where overhead counts most: ratios converted / eager, below 1 where fxamp is
faster.  Eager enters ``torch.autocast`` afresh for every call, as a training loop does.  For inference there
is a second baseline, a region held open around all calls: it keeps the casts of the weights, and goes on
using them when the weights change.

Both sides share one set of weights.  Outputs, gradients and buffers are compared bit for bit before anything
is timed.  Each round times all variants one after the other, on one thread, by the CPU time of that thread;
the ratios are taken within a round, and their median and quartiles printed.

    python benchmarks/eager_cost.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxamp

DTYPE = torch.bfloat16
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model and one input of it."""

    name: str
    model: nn.Module
    x: Tensor


class Block(nn.Module):
    """A pre-norm transformer encoder block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, tokens, width."""
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        raised: Tensor = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + raised


def mlp(width: int = 64, depth: int = 10) -> nn.Module:
    """*depth* linears with ReLU between them."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def transformer(width: int) -> nn.Module:
    """Four encoder blocks and a last norm."""
    return nn.Sequential(*(Block(width) for _ in range(4)), nn.LayerNorm(width))


def cases() -> Iterator[Case]:
    """What is measured, small to large."""
    yield Case("one linear 64, batch 1", nn.Linear(64, 64), torch.randn(1, 64))
    yield Case("mlp 10x64, batch 1", mlp(), torch.randn(1, 64))
    yield Case("mlp 10x64, batch 64", mlp(), torch.randn(64, 64))
    for width in (64, 256):
        yield Case(f"transformer 4x{width}, batch 4x16", transformer(width), torch.randn(4, 16, width))
    try:
        from torchvision.models import resnet18  # noqa: PLC0415
    except ImportError:
        print("resnet18 left out: it needs torchvision (pip install torchvision)")
        return
    yield Case("resnet18, batch 2, 64x64", resnet18(), torch.randn(2, 3, 64, 64))


def autocast() -> torch.autocast:
    """The region that eager enters for every call."""
    return torch.autocast("cpu", dtype=DTYPE)


def forward(run: Callable[[Tensor], Tensor], x: Tensor, region: Callable[[], object] | None) -> Step:
    """One forward pass; in a region of its own if there is one."""

    def step() -> Tensor:
        if region is None:
            return run(x)
        with region():  # type: ignore[attr-defined]
            return run(x)

    return step


def training_step(model: nn.Module, call: Step) -> Step:
    """A forward and a backward pass, after clearing the gradients."""
    parameters = list(model.parameters())
    gradient = torch.randn(1)

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        out = call()
        assert isinstance(out, Tensor)
        out.backward(gradient.to(out.dtype).expand_as(out))
        return out

    return step


def verify(case: Case, *, training: bool) -> None:
    """Outputs, gradients and buffers of two copies, one a side, are bit-equal over two calls."""
    eager, source = copy.deepcopy(case.model), copy.deepcopy(case.model)
    amp = fxamp.convert(source, dtype=DTYPE)
    steps = forward(eager, case.x, autocast), forward(amp, case.x, None)
    if training:
        torch.manual_seed(1)
        one = training_step(eager, steps[0])
        torch.manual_seed(1)
        steps = one, training_step(source, steps[1])
    for _ in range(2):
        outs = [step() for step in steps]
        assert torch.equal(outs[0], outs[1]), f"{case.name}: outputs differ"  # type: ignore[arg-type]
    for (name, p), q in zip(eager.named_parameters(), source.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad), f"{case.name}: gradients of {name} differ"  # type: ignore[arg-type]
    for (name, b), c in zip(eager.named_buffers(), source.buffers(), strict=True):
        assert torch.equal(b, c), f"{case.name}: buffer {name} differs"
    assert not amp.eager_modules, f"{case.name}: {amp.report().eager}"


def seconds(step: Step, calls: int) -> float:
    """CPU time of this thread for one call, the mean of *calls*."""
    start = time.thread_time()
    for _ in range(calls):
        step()
    return (time.thread_time() - start) / calls


def measure(case: Case, *, training: bool, budget: float, rounds: int) -> dict[str, list[float]]:
    """Seconds a call in every round, by variant."""
    case.model.train(training)
    amp = fxamp.convert(case.model, dtype=DTYPE)
    steps = {
        "fxamp": forward(amp, case.x, None),
        "eager": forward(case.model, case.x, autocast),
    }
    if training:
        steps = {name: training_step(case.model, step) for name, step in steps.items()}
    else:
        steps["held open"] = forward(case.model, case.x, None)
    calls = max(1, int(budget / rounds / len(steps) / max(seconds(steps["eager"], 3), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        order = list(steps) if index % 2 else list(reversed(steps))
        for name in order:
            with autocast() if name == "held open" else nullcontext():
                steps[name]()
                taken = seconds(steps[name], calls)
            if index:  # the first round warms up
                times[name].append(taken)
    return times


def ratios(times: dict[str, list[float]], other: str) -> str:
    """``median [quartile, quartile]`` of fxamp / *other* within a round."""
    each = [one / two for one, two in zip(times["fxamp"], times[other], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rounds, budget = (15, 1.5) if options.quick else (41, 8.0)
    table = Table("case", "pass", "eager us", "fxamp us", "fxamp / eager", "fxamp / held open")
    for case in cases():
        if options.only not in case.name:
            continue
        for training in (False, True):
            case.model.train(training)
            with torch.set_grad_enabled(training):
                verify(case, training=training)
                times = measure(case, training=training, budget=budget, rounds=rounds)
            micros = [f"{statistics.median(times[name]) * 1e6:.1f}" for name in ("eager", "fxamp")]
            held = "" if training else ratios(times, "held open")
            table.add_row(
                case.name,
                "forward + backward" if training else "forward",
                *micros,
                ratios(times, "eager"),
                held,
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
