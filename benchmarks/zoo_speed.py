"""Is any model of the zoo slower frozen, or converted, than under eager autocast?

Each model of the lists in ``tests/zoo`` is called in evaluation without gradients, under eager autocast (a
region entered for every call), converted, and frozen, one after the other in each round and in alternating
order.  Ratios of the CPU time of this thread are taken within a round; their median counts, and the quartiles
say how sure it is.  Below the table by library stands each model whose median is above 1.

    python benchmarks/zoo_speed.py [--library timm] [--name resnet] [--rounds 21] [--seconds 0.02]
                                   [--jsonl FILE [--resume]] [--shuffle] [--limit SECONDS] [--table FILE]
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxamp
from benchmarks.sweep import append, by_library, options_of, quiet, read
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import LIBRARIES, Entry

CONTENDERS = ("converted", "frozen")


@dataclass
class Result:
    """What came out for one model.

    Attributes:
        library: Of the model.
        name: Of the model.
        status: ``measured``, ``time``, ``eager fails`` or ``fails``.
        eager: Seconds of a call under eager autocast, the median.
        ratios: By contender, the ratios of its time to eager autocast's, by round.
        pieces: How many modules run eagerly.
        error: What went wrong.
    """

    library: str
    name: str
    status: str = "measured"
    eager: float = 0.0
    ratios: dict[str, list[float]] = field(default_factory=dict)
    pieces: int = 0
    error: str = ""

    def quartiles(self, contender: str) -> list[float]:
        """Of the ratios of *contender*."""
        return statistics.quantiles(self.ratios[contender], n=4)


def main() -> None:
    """Measure what is asked for and print the table."""
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
    for entry in chosen:
        result = _measured(entry, options)
        done.append(result)
        print(f"{result.library}/{result.name}: {_line(result)}", flush=True)
        append(options.jsonl, asdict(result))
    print_table(done)


def _options() -> argparse.Namespace:
    parser = options_of("Time the models of the zoo against eager autocast.", LIBRARIES, limit=120)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.02, help="of eager autocast, in each round")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    return parser.parse_args()


def _read(path: Path) -> list[Result]:
    return read(path, Result, lambda result: (result.library, result.name))


def _measured(entry: Entry, options: argparse.Namespace) -> Result:
    result = Result(entry.library, entry.name)
    try:
        with time_limit(options.limit), torch.no_grad():
            _measure(entry, result, options)
    except TimeLimitError:
        result.status = "time"
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        result.status = result.status if result.status != "measured" else "fails"
        result.error = f"{type(error).__name__}: {error}"
    return result


def _measure(entry: Entry, result: Result, options: argparse.Namespace) -> None:
    low = getattr(torch, options.dtype)
    result.status = "eager fails"
    seed_all(0)
    model = entry.build().eval()
    seed_all(1)
    args, kwargs = entry.inputs(False)  # noqa: FBT003  not for training

    def under_autocast() -> Any:
        with torch.autocast("cpu", dtype=low):
            return model(*args, **kwargs)

    under_autocast()
    eager = min(_seconds(under_autocast, 1) for _ in range(2))
    result.status = "measured"
    amp = fxamp.convert(copy.deepcopy(model), device_type="cpu", dtype=low)
    frozen = fxamp.freeze(amp, args, kwargs)
    calls: dict[str, Callable[[], Any]] = {
        "eager": under_autocast,
        "converted": lambda: amp(*args, **kwargs),
        "frozen": lambda: frozen(*args, **kwargs),
    }
    for call in calls.values():
        call()
        call()
    result.pieces = len(amp.eager_modules)
    count = max(1, int(options.seconds / max(eager, 1e-6)))
    times = _rounds(calls, options.rounds, count)
    result.eager = statistics.median(times["eager"])
    for name in CONTENDERS:
        pairs = zip(times[name], times["eager"], strict=True)
        result.ratios[name] = [round(one / other, 4) for one, other in pairs]


def _rounds(calls: dict[str, Callable[[], Any]], rounds: int, count: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(rounds):
        for name in names if index % 2 else reversed(names):
            times[name].append(_seconds(calls[name], count))
    return times


def _seconds(call: Callable[[], object], count: int) -> float:
    """CPU time of this thread for one call, the mean of *count*."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


# --- what is printed ----------------------------------------------------------------------------------


def _line(result: Result) -> str:
    if result.status != "measured":
        return f"{result.status} {result.error[:200]}"
    texts = []
    for name in CONTENDERS:
        low, middle, high = result.quartiles(name)
        texts.append(f"{name} {middle:.3f} [{low:.3f}, {high:.3f}]")
    pieces = f", {result.pieces} eager pieces" if result.pieces else ""
    return f"{', '.join(texts)} of {result.eager * 1e3:.2f} ms{pieces}"


def print_table(results: list[Result]) -> None:
    """The table by library, and each model above 1."""
    table = Table(title="CPU time of a call in evaluation, relative to eager autocast")
    table.add_column("library")
    for column in (
        "models",
        *(f"{name}, {what}" for name in CONTENDERS for what in ("mean", "least", "most", "> 1")),
    ):
        table.add_column(column, justify="right")
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in (each for each in results if each.status == "measured"):
        groups[result.library].append(result)
        groups["all"].append(result)
    for library, found in sorted(groups.items(), key=lambda group: group[0] == "all"):
        table.add_row(
            library, str(len(found)), *(text for name in CONTENDERS for text in _cells(found, name))
        )
    console = Console(width=150)
    console.print(table)
    for result in results:
        slow = result.status == "measured" and any(result.quartiles(name)[1] > 1 for name in CONTENDERS)
        if slow or result.status == "fails":
            console.print(f"{result.library}/{result.name}: {_line(result)}", markup=False, highlight=False)


def _cells(results: list[Result], contender: str) -> Iterator[str]:
    medians = [result.quartiles(contender)[1] for result in results]
    yield f"{math.exp(statistics.fmean(map(math.log, medians))):.3f}"
    yield f"{min(medians):.3f}"
    yield f"{max(medians):.3f}"
    yield str(sum(median > 1 for median in medians))


if __name__ == "__main__":
    main()
