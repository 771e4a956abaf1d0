"""Where in the user's program a node comes from, and how an error says so."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.fx import Node

__all__ = ["Where", "codes_now", "locate", "where_now", "where_of", "within"]

_TORCH = f"{Path(torch.__file__).parent}/"
_FXAMP = f"{Path(__file__).resolve().parents[1]}/"
_CAPTURE = f"{_FXAMP}capture/capture.py"
_PASSES = f"{Path(__file__).resolve().parents[2] / 'passes'}/"


@dataclass(frozen=True)
class Where:
    """The module path and the source line that an operator was called from."""

    module: str = ""
    file: str = "<unknown>"
    line: int = 0
    function: str = "<unknown>"

    @property
    def source(self) -> str:
        """The text of the source line, without its indentation."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        text = f"{Path(self.file).name}:{self.line} in {self.function}"
        if self.source:
            text += f": {self.source}"
        return f"module {self.module!r}, {text}" if self.module else text


def where_now(module: str) -> Where:
    """Where the innermost frame of the model outside of torch is; torch's own layer code if there is none."""
    frame: FrameType | None = sys._getframe(1)
    innermost: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CAPTURE:  # whose caller is not the model
            break
        if not name.startswith((_FXAMP, _PASSES)):
            if not name.startswith(_TORCH) and not name.startswith("<"):
                innermost = frame
                break
            if innermost is None and "/torch/nn/modules/" in name and not name.endswith("module.py"):
                innermost = frame
        frame = frame.f_back
    if innermost is None:
        return Where(module)
    code = innermost.f_code
    return Where(module, code.co_filename, innermost.f_lineno, code.co_name)


def codes_now(wanted: Container[CodeType]) -> tuple[CodeType, ...]:
    """Which of the *wanted* functions this thread is in."""
    found: list[CodeType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in wanted:
            found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


def where_of(frame: FrameType) -> Where | None:
    """The source line that *frame* is at, if it is the model's code or that of a layer of torch's."""
    name = frame.f_code.co_filename
    if name.startswith((_FXAMP, _PASSES, "<")) or (name.startswith(_TORCH) and "/torch/nn/" not in name):
        return None
    return Where("", name, frame.f_lineno, frame.f_code.co_name)


def within(path: str, where: Where) -> Where:
    """*where*, which is relative to the module at *path*, relative to the model."""
    if not path:
        return where
    return replace(where, module=f"{path}.{where.module}" if where.module else path)


def locate(node: Node) -> str:
    """*node* with the place it comes from, for an error message."""
    where = node.meta.get("where")
    return f"%{node.name} ({where})" if where else f"%{node.name}"
