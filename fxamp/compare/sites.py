"""Which call of an operator in the user's program this is: module path, source line, place in the line.

Read off the Python frames, so nothing is registered on modules.  In flat code the line stands for a node of
the graph, which knows its own origin.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from fxamp.ir.where import Where, within
from fxamp.runtime.lower import FLAT_CODE, ORIGINS

__all__ = ["Site", "Sites"]

_TORCH = f"{Path(torch.__file__).parent}/"
_FXAMP = f"{Path(__file__).resolve().parents[1]}/"
_COMPARE = f"{Path(__file__).resolve().parent}/"
_RUNNER = f"{_FXAMP}runtime/runner.py"
_LOOP = 8  # nodes of one operator in one line
_MODE = f"{_FXAMP}capture/recording_mode.py"


@dataclass(frozen=True)
class Site:
    """One place of the program that calls an operator.

    Attributes:
        op: ``aten::linear``, ...
        where: Module path and source line.
        node: The node's name in the graph of a converted model, else ``""``.
        place: Tells apart several calls in one line.
    """

    op: str
    where: Where
    node: str = ""
    place: int = 0


class Sites:
    """Finds the site of the call that is being made.

    Args:
        model: Whose modules have paths.
    """

    def __init__(self, model: object) -> None:
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        self._dicts = [(module.__dict__, path) for path, module in named]  # keeps the ids alive
        self._nodes: dict[tuple[str, Where, Hashable], set[str]] = {}
        self._paths = {id(state): path for state, path in self._dicts}

    def now(self, op: str, numbers: Hashable = ()) -> Site:
        """The site of the innermost call, seen from the handler of a dispatch mode.

        Args:
            op: The operator's name.
            numbers: What tells it from others of the same name in one line, where nothing else does.
        """
        frame: FrameType | None = sys._getframe(1)
        innermost: FrameType | None = None
        layer: FrameType | None = None
        path: str | None = None
        outside = False  # of the handler
        while frame is not None and (innermost is None or path is None):
            name = frame.f_code.co_filename
            outside |= name == _MODE
            if outside and name.startswith(_COMPARE):
                break  # whose caller is not the model
            if name == FLAT_CODE and innermost is None:
                origin = frame.f_globals[ORIGINS].get(frame.f_lineno)
                if origin is not None:
                    node, where = origin
                    return self._of_node(op, numbers, node, within(_runner_path(frame), where or Where()))
            if path is None and frame.f_code.co_name == "_call_impl" and name.startswith(_TORCH):
                path = self._paths.get(id(getattr(frame.f_locals.get("self"), "__dict__", None)))
            if innermost is None and not name.startswith((_FXAMP, "<")):
                if not name.startswith(_TORCH):
                    innermost = frame
                elif layer is None and "/torch/nn/modules/" in name and not name.endswith("module.py"):
                    layer = frame
            frame = frame.f_back
        innermost = innermost or layer
        if innermost is None:
            return Site(op, Where(path or ""))
        code = innermost.f_code
        where = Where(path or "", code.co_filename, innermost.f_lineno, code.co_name)
        return Site(op, where, place=innermost.f_lasti)

    def _of_node(self, op: str, numbers: Hashable, node: str, where: Where) -> Site:
        """The site of a node; the nodes of a loop that was unrolled share one from some number on."""
        nodes = self._nodes.setdefault((op, where, numbers), set())
        if node not in nodes and len(nodes) == _LOOP:
            return Site(op, where, place=hash(numbers))
        nodes.add(node)
        return Site(op, where, node)


def _runner_path(frame: FrameType | None) -> str:
    """The path of the module whose graph is being run: graphs know places relative to it."""
    while frame is not None and frame.f_code.co_filename != _RUNNER:
        frame = frame.f_back
    return str(getattr(frame.f_locals.get("self"), "path", "")) if frame is not None else ""
