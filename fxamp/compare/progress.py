"""A bar for long work, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress_over"]

_Item = TypeVar("_Item")


def progress_over(items: Iterator[_Item], count: int | None, *, show: bool | None = None) -> Iterator[_Item]:
    """*items*, with a bar on standard error that counts them.

    Args:
        items: What takes long.
        count: How many there are, if that is known.
        show: Whether to show it; by default where standard error is a terminal and there are several.
    """
    if show is None:
        show = sys.stderr.isatty() and count != 1
    if not show:
        yield from items
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("inputs", total=count)
        for item in items:
            yield item
            progress.advance(task)
