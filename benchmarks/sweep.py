"""What the sweeps over the zoo share: their options, the models of a library, the file of their results."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.zoo.entry import Entry, entries

__all__ = ["append", "by_library", "options_of", "quiet", "read"]

Result = TypeVar("Result")


def options_of(
    description: str, libraries: Sequence[str], *, limit: int, modes: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options of every sweep; with *modes* each model is run in evaluation and training."""
    what = "model and mode" if modes else "model"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", action="append", choices=list(libraries), help="by default all")
    parser.add_argument("--name", default="", help="only models with this in their name")
    if modes:
        parser.add_argument("--mode", choices=("eval", "train", "both"), default="both")
    parser.add_argument("--jsonl", type=Path, help=f"a line for every {what} is appended here")
    parser.add_argument("--resume", action="store_true", help="leave out what the file already has")
    parser.add_argument("--shuffle", action="store_true", help="in a random order, always the same")
    per = "one model in one mode" if modes else "one model"
    parser.add_argument("--limit", type=int, default=limit, help=f"seconds for {per}")
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    return parser


def quiet() -> None:
    """One thread, and nothing of what libraries warn of and log."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def by_library(options: argparse.Namespace, libraries: Sequence[str]) -> Iterator[tuple[Entry, ...]]:
    """The models of each library that is asked for and installed, those with the name that is asked for."""
    for library in options.library or libraries:
        try:
            listed = entries(library)
        except ImportError as error:
            print(f"{library} is left out: {error}")
            continue
        yield tuple(entry for entry in listed if options.name in entry.name)


def read(path: Path, make: Callable[..., Result], title: Callable[[Result], object]) -> list[Result]:
    """What *make* makes of the lines of *path*; of those with the same title the last."""
    lines = [make(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({title(line): line for line in lines}.values())


def append(path: Path | None, values: Mapping[str, Any]) -> None:
    """A line with *values*, if there is a file to write it to."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(values) + "\n")
