"""What does ``fxamp.compare`` cost, in time and in memory, against the two forwards that it compares?

Time is that of the processor, on one thread, so a busy machine does not count; memory is counted from the
storages that operators make.  ``python benchmarks/compare_cost.py``
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp

ROUNDS = 3
DTYPE = torch.bfloat16


class Peak(TorchDispatchMode):
    """Counts bytes of the storages that come to be inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, tensor.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return result

    def _note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:

            def gone(_: object) -> None:
                self.now -= size
                del self.known[key]

            self.known[key] = weakref.ref(storage, gone)
            self.now += size


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    real = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)]
    return [leaf for leaf in real if leaf.device.type != "meta"]


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A model of each kind, with its input."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), *(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))]
    return {
        "transformer 4x256": (
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            torch.randn(4, 64, 256),
        ),
        "mlp 10x512": (nn.Sequential(*(nn.Linear(512, 512) for _ in range(10))), torch.randn(512, 512)),
        "4 convolutions of 32": (nn.Sequential(*convolutions), torch.randn(1, 3, 96, 96)),
    }


def main() -> None:
    """Print a line a model."""
    torch.set_num_threads(1)
    print(f"{'model':22} {'time: bits and float32':>24} {'float32 alone':>14} {'memory':>8}")
    for name, (model, x) in models().items():
        model.train()

        def autocast(model: nn.Module = model, x: torch.Tensor = x) -> Any:
            with torch.no_grad(), torch.autocast("cpu", dtype=DTYPE):
                return model(x)

        def plain(model: nn.Module = model, x: torch.Tensor = x) -> Any:
            with torch.no_grad():
                return model(x)

        def compared(*against: str, model: nn.Module = model, x: torch.Tensor = x) -> Any:
            return fxamp.compare(model, x, against, dtype=DTYPE)

        runs = (autocast, plain, lambda: compared("autocast", "float32"), lambda: compared("float32"))
        eager, single, both, alone = _times(runs)
        memory = _peak(lambda: compared("autocast", "float32")) / (_peak(autocast) + _peak(plain))
        ratios = both / (eager + single), alone / (eager + single)
        print(f"{name:22} {ratios[0]:>23.2f}x {ratios[1]:>13.2f}x {memory:>7.2f}x")


def _times(runs: tuple[Callable[[], Any], ...]) -> list[float]:
    """Median processor time of each of *runs*, taken in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS + 1):
        for times, run in zip(taken, runs, strict=True):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    return [statistics.median(times[1:]) for times in taken]


def _peak(run: Callable[[], Any]) -> int:
    gc.collect()
    with Peak() as peak:
        result = run()
    del result
    return peak.most


if __name__ == "__main__":
    main()
