"""Text and tables of rich as plain text of a fixed width, or as HTML: a value prints the same anywhere."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.text import Text

__all__ = ["as_html", "as_text"]

_WIDTH = 118


def as_text(parts: Iterable[RenderableType], width: int = _WIDTH) -> str:
    """*parts* without colours, tables *width* columns wide whatever the terminal is; text is not wrapped."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, highlight=False, emoji=False
    )
    for part in parts:
        if isinstance(part, Text):
            file.write(f"{part.plain}\n")
        else:
            console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(renderable: RenderableType, width: int = _WIDTH) -> str:
    """*renderable* as a ``<pre>`` with inline styles, as notebooks show it."""
    console = Console(
        file=io.StringIO(), width=width, record=True, highlight=False, emoji=False, force_jupyter=False
    )
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')
