"""Does any model of the zoo make more casts than under eager autocast?

Each model of the lists in ``tests/zoo`` is called under eager autocast, converted and, in evaluation, frozen;
the casts that a call dispatches are counted.  The table sums them up by library and mode: in how many models
there are fewer, as many or more, and how many casts are left in all.  Below it stands each exception.

    python benchmarks/cast_counts.py [--library timm] [--name resnet] [--mode eval|train|both]
                                     [--jsonl FILE [--resume]] [--shuffle] [--limit SECONDS] [--table FILE]
                                     [--real]

Large products are skipped where the model reads nothing that is made of them; with ``--real`` they never are.

The exit code is 1 if a model makes more casts than eager autocast, or frozen casts a weight.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sweep import append, by_library, options_of, quiet, read
from tests.zoo.casts import CastCounts, try_to_count
from tests.zoo.entry import LIBRARIES, Entry

_COLUMNS = (
    "models",
    "fewer",
    "as many",
    "more",
    "eager",
    "converted",
    "frozen",
    "weights, eager",
    "weights, frozen",
)


def main() -> int:
    """Count what is asked for and print the table."""
    options = _options()
    quiet()
    if options.table:
        return print_table(_read(options.table))
    done = _read(options.jsonl) if options.resume and options.jsonl.exists() else []
    known = {(counts.library, counts.name, counts.mode) for counts in done}
    modes = ("eval", "train") if options.mode == "both" else (options.mode,)
    for entry in _chosen(options):
        for mode in modes:
            if mode in entry.modes and (entry.library, entry.name, mode) not in known:
                counts = try_to_count(entry, mode, limit=options.limit, quick=not options.real)
                done.append(counts)
                print(
                    f"{_title(counts)}: {counts.status}{''.join(f'; {text}' for text in counts.excess)}",
                    flush=True,
                )
                append(options.jsonl, counts.as_dict())
    return print_table(done)


def _options() -> argparse.Namespace:
    parser = options_of("Count the casts of the zoo.", LIBRARIES, limit=60, modes=True)
    parser.add_argument("--real", action="store_true", help="all products are computed")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Entry]:
    chosen = [entry for listed in by_library(options, LIBRARIES) for entry in listed]
    if options.shuffle:
        random.Random(0).shuffle(chosen)
    return chosen


def _read(path: Path) -> list[CastCounts]:
    return read(path, CastCounts, _title)


def _title(counts: CastCounts) -> str:
    return f"{counts.library}/{counts.name} {counts.mode}"


def print_table(results: list[CastCounts]) -> int:
    """The table by library and mode, and each exception; whether there is any excess."""
    table = Table(title="casts of a call, CPU, bfloat16")
    for column in ("library", "mode", *_COLUMNS):
        table.add_column(column, justify="left" if column in ("library", "mode") else "right")
    groups: dict[tuple[str, str], list[CastCounts]] = defaultdict(list)
    for counts in results:
        groups[counts.library, counts.mode].append(counts)
        groups["all", counts.mode].append(counts)
    for key in sorted(groups, key=lambda key: (key[0] == "all", key)):
        table.add_row(*key, *map(str, _row(groups[key])))
    console = Console(width=140)
    console.print(table)
    for counts in results:
        if counts.excess or counts.error or counts.status != "counted":
            pieces = (
                f"; eager: {', '.join(path or 'the model' for path in counts.pieces)}"
                if counts.pieces
                else ""
            )
            text = "; ".join([counts.status, *counts.excess, counts.error]).strip("; ")
            console.print(f"{_title(counts)}: {text}{pieces}", markup=False, highlight=False)
    return int(any(counts.excess for counts in results))


def _row(results: list[CastCounts]) -> tuple[int, ...]:
    counted = [counts for counts in results if counts.status == "counted"]
    frozen = [counts for counts in counted if counts.frozen >= 0]
    return (
        len(counted),
        sum(counts.converted < counts.eager for counts in counted),
        sum(counts.converted == counts.eager for counts in counted),
        sum(counts.converted > counts.eager for counts in counted),
        sum(counts.eager for counts in counted),
        sum(counts.converted for counts in counted),
        sum(counts.frozen for counts in frozen),
        sum(counts.eager_weights for counts in frozen),
        sum(counts.frozen_weights for counts in frozen),
    )


if __name__ == "__main__":
    sys.exit(main())
