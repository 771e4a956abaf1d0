"""How much of the zoo runs in graphs, and is it all equal to eager autocast?

Every model of the lists in ``tests/zoo`` is converted and compared bit for bit with eager autocast on the
CPU, in evaluation and in training mode.  The table says, by library: how many models eager autocast runs, how
many of them are equal, which share of their operators is dispatched inside of programs, and how many calls of
other sizes the first program served.  Below it stand the exceptions with their causes.

    python benchmarks/zoo.py [--library timm] [--name resnet] [--mode eval|train|both]
                             [--jsonl FILE [--resume]] [--shuffle] [--limit SECONDS] [--table FILE]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sweep import append, by_library, options_of, quiet, read
from tests.zoo.check import Result, check
from tests.zoo.entry import LIBRARIES


def main() -> None:
    """Run what is asked for and print the table."""
    options = _options()
    quiet()
    if options.table:
        print_table(_read(options.table))
        return
    done = _read(options.jsonl) if options.resume and options.jsonl.exists() else []
    known = {(result.library, result.name, result.mode) for result in done}
    modes = ("eval", "train") if options.mode == "both" else (options.mode,)
    chosen = [entry for listed in by_library(options, LIBRARIES) for entry in listed]
    if options.shuffle:
        random.Random(0).shuffle(chosen)
    for entry in chosen:
        for mode in modes:
            if mode in entry.modes and (entry.library, entry.name, mode) not in known:
                result = check(entry, mode, limit=options.limit)
                done.append(result)
                _tell(result)
                append(options.jsonl, result.as_dict())
    print_table(done)


def _options() -> argparse.Namespace:
    return options_of("Compare the zoo with eager autocast.", LIBRARIES, limit=120, modes=True).parse_args()


def _read(path: Path) -> list[Result]:
    return read(path, Result, lambda result: (result.library, result.name, result.mode))


def _tell(result: Result) -> None:
    share = _share([result])
    print(
        f"{result.library}/{result.name} {result.mode}: {result.status}, {share} in graphs,"
        f" sizes {result.sizes}, capture {result.capture} s, {result.seconds} s",
        flush=True,
    )


def print_table(results: list[Result]) -> None:
    """The table by library and mode, and each exception with its cause."""
    table = Table(title="converted against eager autocast, CPU, bfloat16")
    columns = ("library", "mode", "models", "equal", "out of time", "wholly in graphs", "operators in graphs")
    for column in (*columns, "other sizes equal", "without recapture", "capture, median s"):
        table.add_column(column, justify="left" if column in ("library", "mode") else "right")
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.library, result.mode].append(result)
        groups["all", result.mode].append(result)
    for key in sorted(groups, key=lambda key: (key[0] == "all", key)):
        table.add_row(*key, *_row(groups[key]))
    console = Console(width=140)
    console.print(table)
    for text, count in _exceptions(results).most_common():
        console.print(f"{count:4d}  {text}", markup=False, highlight=False)


def _counts(results: list[Result]) -> list[Result]:
    return [result for result in results if result.status not in ("eager fails", "build fails", "time")]


def _row(results: list[Result]) -> list[str]:
    counted = _counts(results)
    equal = [result for result in counted if result.status == "equal"]
    resized = [result for result in counted if result.sizes not in ("-", "eager fails", "time")]
    good = [result for result in resized if result.sizes in ("same program", "recaptured")]
    same = [result for result in good if result.sizes == "same program" and result.inside]
    captures = sorted(result.capture for result in counted)
    return [
        str(len(counted)),
        str(len(equal)),
        str(sum(result.status == "time" for result in results)),
        str(sum(not result.outside and result.inside > 0 for result in counted)),
        _share(counted),
        f"{len(good)} of {len(resized)}",
        str(len(same)),
        f"{captures[len(captures) // 2]:.2f}" if captures else "-",
    ]


def _share(results: list[Result]) -> str:
    inside = sum(result.inside for result in results)
    outside = sum(result.outside for result in results)
    return f"{100 * inside / (inside + outside):.1f} %" if inside + outside else "-"


def _exceptions(results: list[Result]) -> Counter[str]:
    texts: Counter[str] = Counter()
    for result in results:
        name = f"{result.library}/{result.name} {result.mode}"
        if result.status != "equal":
            texts[f"{name}: {result.status}: {_detail(result)}"] += 1
        for reason in {reason.splitlines()[0] for _, reason in result.eager}:
            texts[f"eager: {reason}"] += 1
    return texts


def _detail(result: Result) -> Any:
    if result.differs:
        return f"{', '.join(result.differs[:4])} ({len(result.differs)} in all)"
    return result.error.strip().splitlines()[-1] if result.error else ""


if __name__ == "__main__":
    main()
