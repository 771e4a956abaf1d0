"""The demonstration: one network, real data, trained under eager autocast and through ``convert``.

Both start from the same seed.  What is claimed is measured: the weights and buffers at the end are compared
bit for bit, the casts in the graph are counted against those that eager autocast makes.  Once more in
float32, for the accuracy.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.api import convert
from fxamp.ir.text import show

__all__ = [
    "Data",
    "DigitNetwork",
    "Outcome",
    "Training",
    "add_arguments",
    "command",
    "compare",
    "differing",
    "load_data",
    "print_outcome",
]

_TRAININGS = ("float32", "autocast", "fxamp")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BATCH = 64
_TEST_SHARE = 6
_GRAPH_LINES = 8


@dataclass(frozen=True)
class Data:
    """Images, shape ``(n, 1, 8, 8)`` in [0, 1], and their digits; the last sixth is for testing."""

    images: Tensor
    labels: Tensor

    def split(self) -> tuple[Data, Data]:
        """The part to train on and the part to test on."""
        cut = len(self.labels) - len(self.labels) // _TEST_SHARE
        return Data(self.images[:cut], self.labels[:cut]), Data(self.images[cut:], self.labels[cut:])


@dataclass(frozen=True)
class Training:
    """How one network was trained.

    Attributes:
        network: The network at the end.
        losses: The mean loss of each epoch.
        accuracy: The share of the test images that it gets right.
    """

    network: nn.Module
    losses: tuple[float, ...]
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """What the demonstration found.

    Attributes:
        float32: Trained without autocast.
        autocast: Trained under eager autocast.
        fxamp: Trained through ``convert``.
        differing: Names of the weights and buffers in which the last two are not bit-equal.
        casts_in_graph: Casts written in the graph of a training step.
        casts_by_eager: Casts that eager autocast makes in that step.
        graph: That graph as text, a line a node.
    """

    float32: Training
    autocast: Training
    fxamp: Training
    differing: tuple[str, ...]
    casts_in_graph: int
    casts_by_eager: int
    graph: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether all weights and buffers are bit-equal, and the losses of all epochs."""
        return not self.differing and self.autocast.losses == self.fxamp.losses


class DigitNetwork(nn.Module):
    """A small convolutional network with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv_2, self.norm_2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.dropout = nn.Dropout(0.25)
        self.hidden, self.digits = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, or without labels one score a digit, shape ``(n, 10)``."""
        x = torch.relu(self.norm_1(self.conv_1(images)))
        x = nn.functional.max_pool2d(torch.relu(self.norm_2(self.conv_2(x))), 2)
        x = torch.relu(self.hidden(self.dropout(x.flatten(1))))
        scores: Tensor = self.digits(self.dropout(x))
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


def load_data(samples: int | None = None) -> Data:
    """The digits that come with scikit-learn, in a fixed random order; all of them, or *samples*.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra, only needed here
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the demo needs scikit-learn for its data\n  install it:  pip install 'fxamp[demo]'"
        ) from error
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))[:samples]
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return Data(images[order], torch.as_tensor(digits.target)[order])


def compare(
    data: Data,
    *,
    device_type: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    epochs: int = 5,
    tick: Callable[[str], None] = lambda name: None,
) -> Outcome:
    """Train the three networks.

    Args:
        data: What to train and test on.
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: float16 or bfloat16.
        epochs: How often the training data is seen.
        tick: Called after each epoch with what is trained: ``"float32"``, ``"autocast"`` or ``"fxamp"``.
    """
    data = Data(data.images.to(device_type), data.labels.to(device_type))
    scaler = torch.amp.GradScaler(device_type, enabled=dtype is torch.float16)

    def region() -> torch.autocast:
        return torch.autocast(device_type, dtype=dtype)

    with _reproducible():
        network = _new_network(device_type)
        float32 = _train(network, network, _no_scaler(), nullcontext, data, epochs, lambda: tick("float32"))
        network = _new_network(device_type)
        autocast = _train(network, network, scaler, region, data, epochs, lambda: tick("autocast"))
        network = _new_network(device_type)
        amp = convert(network, device_type=device_type, dtype=dtype)
        fxamp = _train(network, amp, amp.scaler, nullcontext, data, epochs, lambda: tick("fxamp"))
    amp.train()
    amp.capture(data.images[:_BATCH], data.labels[:_BATCH])
    return Outcome(
        float32,
        autocast,
        fxamp,
        differing=differing(autocast.network, fxamp.network),
        casts_in_graph=sum("inserted" in node.meta for node in amp.graph_module.graph.nodes),
        casts_by_eager=_count_eager_casts(network, region, data),
        graph=tuple(show(amp.graph_module).splitlines()),
    )


def differing(one: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Names of the weights and buffers in which the two are not bit-equal."""
    theirs = other.state_dict()
    return tuple(name for name, value in one.state_dict().items() if not torch.equal(value, theirs[name]))


def _new_network(device_type: str) -> nn.Module:
    torch.manual_seed(0)
    return DigitNetwork().to(device_type)


def _no_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=False)


def _train(
    network: nn.Module,
    call: Callable[..., Tensor],
    scaler: torch.amp.GradScaler,
    region: Callable[[], AbstractContextManager[Any]],
    data: Data,
    epochs: int,
    tick: Callable[[], None],
) -> Training:
    """Train *network*, calling it as ``call(images, labels)`` inside ``region()``."""
    train, test = data.split()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    shuffle = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        network.train()
        total = torch.zeros((), device=data.labels.device)
        batches = torch.randperm(len(train.labels), generator=shuffle).to(data.labels.device).split(_BATCH)
        for batch in batches:
            optimizer.zero_grad()
            with region():
                loss = call(train.images[batch], train.labels[batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach().float()
        losses.append(total.item() / len(batches))
        tick()
    network.eval()
    with torch.no_grad(), region():
        right = call(test.images).argmax(1) == test.labels
    return Training(network, tuple(losses), right.float().mean().item())


class _CastCounter(TorchDispatchMode):
    """Counts the casts that reach the kernels."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::_to_copy"
        return func(*args, **(kwargs or {}))


def _count_eager_casts(network: nn.Module, region: Callable[[], torch.autocast], data: Data) -> int:
    copied = copy.deepcopy(network).train()
    counter = _CastCounter()
    with region(), counter:
        copied(data.images[:_BATCH], data.labels[:_BATCH])
    return counter.count


@contextmanager
def _reproducible() -> Iterator[None]:
    """Only kernels that give the same bits every time, on one thread: so small a network gains by no more."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


# --- the command ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m fxamp demo``."""
    parser.add_argument("--dtype", choices=list(_DTYPES), help="default: fp16 on a GPU, bf16 on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")


def command(options: argparse.Namespace) -> int:
    """Run the demonstration; 0 if both trainings are bit-equal, 1 if not, 2 if it cannot run."""
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _DTYPES[options.dtype or ("fp16" if device_type == "cuda" else "bf16")]
    if device_type == "cuda" and not torch.cuda.is_available():
        print("this torch sees no GPU\n  run on the CPU:  python -m fxamp demo --device cpu", file=sys.stderr)
        return 2
    try:
        data = load_data()
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.print(f"{len(data.labels)} images of digits, {device_type}, {dtype}, {options.epochs} epochs")
    with _progress(console, options.epochs) as tick:
        outcome = compare(data, device_type=device_type, dtype=dtype, epochs=options.epochs, tick=tick)
    print_outcome(outcome, console)
    return 0 if outcome.equal else 1


@contextmanager
def _progress(console: Console, epochs: int) -> Iterator[Callable[[str], None]]:
    """A bar for each training on a terminal, a line when it is done elsewhere."""
    if not console.is_terminal:
        seen: Counter[str] = Counter()

        def count(name: str) -> None:
            seen[name] += 1
            if seen[name] == epochs:
                console.print(f"trained: {name}")

        yield count
        return
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=epochs) for name in _TRAININGS}
        yield lambda name: progress.advance(tasks[name])


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the loss curves, what is equal, the casts, the accuracies and a piece of the graph."""
    table = Table("epoch", "autocast", "fxamp", title="mean training loss", title_justify="left")
    for index, pair in enumerate(zip(outcome.autocast.losses, outcome.fxamp.losses, strict=True)):
        table.add_row(str(index + 1), *(f"{loss:.9f}" for loss in pair))
    console.print(table)
    count = len(outcome.fxamp.network.state_dict())
    if outcome.equal:
        console.print(f"All {count} weights and buffers are bit-equal (torch.equal).")
    else:
        listed = ", ".join(outcome.differing) or "none of the weights, but the losses"
        console.print(f"NOT equal: {listed} differ.")
    console.print(
        f"Casts in a training step: {outcome.casts_in_graph} written in the graph, "
        f"{outcome.casts_by_eager} made by eager autocast."
    )
    accuracies = {name: getattr(outcome, name).accuracy for name in _TRAININGS}
    console.print("Test accuracy: " + ", ".join(f"{name} {share:.2%}" for name, share in accuracies.items()))
    console.print("From the graph:")
    for line in _excerpt(outcome.graph):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _excerpt(graph: Sequence[str]) -> Sequence[str]:
    """The first operators, casts among them."""
    return [line for line in graph if "(" in line.partition(" = ")[2]][:_GRAPH_LINES]
