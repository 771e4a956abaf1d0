"""Does an artifact of pt2 give the bits of eager autocast, wherever it is loaded?

Each model of the lists in ``tests/zoo`` is exported with a symbolic batch, where it has one, and loaded in a
process that cannot import fxamp.  There it is called four times and compared with the original model under
``torch.autocast``, every tensor of the results with ``torch.equal``: for the example; for the example once
more in an ambient region of float16; and for two other batch sizes.  A last call with a batch of one is
counted apart.  The table says how many are equal, by library; below it stands every failure with its cause.

    python benchmarks/export.py [--library timm] [--name resnet] [--limit SECONDS]
                                [--jsonl FILE [--resume]] [--shuffle] [--table FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxamp
from benchmarks.sweep import append, by_library, options_of, quiet, read
from fxamp.export.check import FreshProcess
from tests.models import equal
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import LIBRARIES, Entry, Inputs
from tests.zoo.leaves import named_tensors

DTYPE = torch.bfloat16
SIZES = (3, 5)
_MODELS_A_PROCESS = 20  # what a process has loaded stays in its memory


@dataclass
class Result:
    """What came out for one model.

    Attributes:
        library: Of the model.
        name: Of the model.
        status: ``equal``, ``differs``, ``refused``, ``fails``, ``time``, ``eager fails`` or ``build fails``.
        ambient: ``equal`` or what differs in an ambient region; ``-`` if it was not called.
        sizes: By batch size, likewise.
        batch: Whether a size was symbolic.
        notes: What the artifact says of differences.
        weights: Bytes of the weights over those in float32.
        seconds: In all.
        error: Why it was refused or fails, or what differs.
    """

    library: str
    name: str
    status: str = "equal"
    ambient: str = "-"
    sizes: dict[str, str] = field(default_factory=dict)
    batch: bool = False
    notes: list[str] = field(default_factory=list)
    weights: float = 0.0
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Run what is asked for and print the table."""
    options = _options()
    quiet()
    if options.table:
        print_table(_read(options.table))
        return
    done = _read(options.jsonl) if options.resume and options.jsonl.exists() else []
    known = {(result.library, result.name) for result in done}
    listed = [entry for of_library in by_library(options, LIBRARIES) for entry in of_library]
    chosen = [e for e in listed if "eval" in e.modes and (e.library, e.name) not in known]
    if options.shuffle:
        random.Random(0).shuffle(chosen)
    for result in _results(chosen, options.limit):
        done.append(result)
        print(
            f"{result.library}/{result.name}: {result.status}, ambient {result.ambient},"
            f" sizes {result.sizes}, {result.seconds} s {result.error[:300]}",
            flush=True,
        )
        append(options.jsonl, asdict(result))
    print_table(done)


def _options() -> argparse.Namespace:
    return options_of("Compare artifacts of pt2 with eager autocast.", LIBRARIES, limit=120).parse_args()


def _read(path: Path) -> list[Result]:
    return read(path, Result, lambda result: (result.library, result.name))


def _results(chosen: Sequence[Entry], limit: int) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(chosen), _MODELS_A_PROCESS):
            process = FreshProcess("cpu")
            for entry in chosen[first : first + _MODELS_A_PROCESS]:
                result = Result(entry.library, entry.name)
                start = time.perf_counter()
                try:
                    with time_limit(limit):
                        _compare(entry, result, process, Path(folder))
                except TimeLimitError:
                    result.status = "time"
                except Exception as error:  # noqa: BLE001  whatever it is, it is the result
                    refused = isinstance(error, fxamp.FxampError)
                    result.status = "refused" if refused else "fails"
                    result.error = f"{type(error).__name__}: {error}"
                if result.status == "time" or not process.is_alive:
                    process.close()
                    process = FreshProcess("cpu")
                result.seconds = round(time.perf_counter() - start, 1)
                gc.collect()
                yield result
            process.close()


def _compare(entry: Entry, result: Result, process: FreshProcess, folder: Path) -> None:
    seed_all(0)
    try:
        model = entry.build().eval()
        eager = _copied(model, entry)
    except Exception as error:  # noqa: BLE001  a list may be wrong about a library's version
        result.status, result.error = "build fails", f"{type(error).__name__}: {error}"
        return
    call = _inputs(entry, 1)
    batch = _batch(call, _inputs(entry, 1, resized=True))
    calls = {"example": call, "ambient": call}
    if any(any(dims.values()) for dims in batch):
        calls |= {str(size): _of_size(entry, call, batch, size) for size in (*SIZES, 1)}
    try:
        wanted = _eager_results(eager, calls)
    except Exception as error:  # noqa: BLE001  then there is nothing to be equal to
        result.status, result.error = "eager fails", f"{type(error).__name__}: {error}"
        return
    del eager
    file = folder / "model.pt2"
    try:
        artifact = _export(model, call, file, batch, result)
        del model
        result.notes = list(artifact.notes)
        result.weights = artifact.weight_bytes / max(artifact.float32_bytes, 1)
        if not result.batch:
            wanted = {key: wanted[key] for key in ("example", "ambient")}
        _run(process, file, artifact.imports, calls, wanted, result)
    finally:
        file.unlink(missing_ok=True)


def _export(model: nn.Module, call: Inputs, file: Path, batch: list[dict[int, int]], result: Result) -> Any:
    """The artifact; with the batch as it is if it cannot be symbolic, which *result* then says."""
    shapes = _dynamic_shapes(model, call, batch) if any(any(dims.values()) for dims in batch) else None
    args, kwargs = copy.deepcopy(call)
    if shapes is not None:
        try:
            made = fxamp.export(model, args, kwargs, file, dtype=DTYPE, dynamic_shapes=shapes, check=False)
        except fxamp.FxampError as error:
            result.error = f"no symbolic batch: {error}"
        else:
            result.batch = True
            return made
    return fxamp.export(model, args, kwargs, file, dtype=DTYPE, check=False)


def _run(
    process: FreshProcess,
    file: Path,
    imports: Sequence[str],
    calls: dict[str, Inputs],
    wanted: dict[str, Any],
    result: Result,
) -> None:
    keys = [key for key in calls if key in wanted]
    regions = ["float16" if key == "ambient" else None for key in keys]
    got = process.run(file, [calls[key] for key in keys], imports=imports, ambient=regions)
    for key, found in zip(keys, got, strict=True):
        told = found if isinstance(found, str) else _difference(found, wanted[key])
        if key == "example":
            result.status = "differs" if told else "equal"
            result.error = f"{told} {result.error}".strip()
        elif key == "ambient":
            result.ambient = told or "equal"
        else:
            result.sizes[key] = told or "equal"


def _difference(got: Sequence[Any], wanted: Sequence[Tensor]) -> str:
    found = [leaf for leaf in got if isinstance(leaf, Tensor)]
    if len(found) != len(wanted):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{index}: {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
        if not equal(one, other):
            return f"{index}: {int((one != other).sum())} of {one.numel()} elements differ"
    return ""


def _eager_results(model: nn.Module, calls: dict[str, Inputs]) -> dict[str, list[Tensor]]:
    found = {}
    for key, call in calls.items():
        args, kwargs = copy.deepcopy(call)
        torch.manual_seed(0)
        try:
            with torch.no_grad(), torch.autocast("cpu", DTYPE):
                value = model(*args, **kwargs)
        except Exception:
            if key in ("example", "ambient"):
                raise
            continue
        found[key] = [tensor.detach().clone() for tensor in named_tensors(value).values()]
    return found


def _copied(model: nn.Module, entry: Entry) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception:  # noqa: BLE001  not every model can be copied; all can be built again
        seed_all(0)
        return entry.build().eval()


def _inputs(entry: Entry, seed: int, *, resized: bool = False) -> Inputs:
    seed_all(seed)
    training = False
    if resized and entry.resized is not None:
        return entry.resized(training)
    return entry.inputs(training)


def _batch(call: Inputs, resized: Inputs) -> list[dict[int, int]]:
    """For each tensor of *call*, the dimensions that double with the batch, with how many a row of it has."""
    pairs = zip(pytree.tree_leaves(call), pytree.tree_leaves(resized), strict=False)
    return [
        {
            dim: size // 2
            for dim, (size, other) in enumerate(zip(one.shape, two.shape, strict=False))
            if other == 2 * size > 0 == size % 2
        }
        for one, two in pairs
        if isinstance(one, Tensor)
    ]


def _of_size(entry: Entry, call: Inputs, batch: list[dict[int, int]], size: int) -> Inputs:
    """A call with *size* rows, taken from several examples."""
    others = [_tensors(_inputs(entry, seed)) for seed in range(2, 2 + (size + 1) // 2)]
    rows = iter(zip(batch, zip(*others, strict=True), strict=True))

    def resized(tensor: Tensor) -> Tensor:
        dims, found = next(rows)
        for dim, count in dims.items():
            tensor = torch.cat(found, dim).narrow(dim, 0, size * count)
        return tensor

    result: Inputs = pytree.tree_map_only(Tensor, resized, call)
    return result


def _tensors(call: Inputs) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def _dynamic_shapes(model: nn.Module, call: Inputs, batch: list[dict[int, int]]) -> Any:
    """What ``torch.export`` is told: a name by argument, ``None`` for all that is no tensor."""
    dim = Dim("batch", max=32)  # some models go another way for many rows
    dims = iter(batch)

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return {d: dim if count == 1 else count * dim for d, count in next(dims).items()}

    args, kwargs = pytree.tree_map(shape, call)
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def print_table(results: list[Result]) -> None:
    """The table by library, and each failure with its cause."""
    table = Table(title="artifacts of pt2 against eager autocast of the model, CPU, bfloat16")
    table.add_column("library")
    columns = ("models", "equal", "ambient equal", "symbolic batch", "other sizes equal")
    for column in (*columns, "batch of 1 equal", "out of time", "weights"):
        table.add_column(column, justify="right")
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.library].append(result)
        groups["all"].append(result)
    for library, found in groups.items():
        if library != "all":
            table.add_row(library, *_row(found))
    table.add_row("all", *_row(groups["all"]))
    console = Console(width=150)
    console.print(table)
    for result in results:
        for text in _failures(result):
            console.print(f"{result.library}/{result.name}: {text}", markup=False, highlight=False)


def _row(results: list[Result]) -> list[str]:
    counted = [result for result in results if result.status not in ("eager fails", "build fails", "time")]
    resized = [result for result in counted if any(str(size) in result.sizes for size in SIZES)]
    ones = [result for result in counted if "1" in result.sizes]
    ratios = sorted(result.weights for result in counted if result.weights)
    return [
        str(len(counted)),
        str(sum(result.status == "equal" for result in counted)),
        str(sum(result.ambient == "equal" for result in counted)),
        str(sum(result.batch for result in counted)),
        f"{sum(_are_equal(result) for result in resized)} of {len(resized)}",
        f"{sum(result.sizes['1'] == 'equal' for result in ones)} of {len(ones)}",
        str(sum(result.status == "time" for result in results)),
        f"{ratios[len(ratios) // 2]:.2f}" if ratios else "-",
    ]


def _are_equal(result: Result) -> bool:
    return all(text == "equal" for size, text in result.sizes.items() if size != "1")


def _failures(result: Result) -> Iterator[str]:
    if result.status != "equal" or result.error:
        yield f"{result.status}: {_first_lines(result.error)}"
    if result.ambient not in ("equal", "-"):
        yield f"in an ambient region: {_first_lines(result.ambient)}"
    for size, text in result.sizes.items():
        if text != "equal":
            yield f"batch of {size}: {_first_lines(text)}"


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:220]


if __name__ == "__main__":
    main()
