"""A plan: one precision decision on file, with the graphs that it made, to be made again elsewhere."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxamp.errors import PolicyError

__all__ = ["Plan", "PlannedGraph", "PlannedOperator"]

_FORMAT = "fxamp plan 1"


@dataclass(frozen=True)
class PlannedOperator:
    """One operator of a graph.

    Attributes:
        module: The path of the module that calls it.
        op: ``aten::linear``, ...
        dtypes: ``bf16, bf16 -> bf16``.
        rule: The rule or override that decided, with its reason.
    """

    module: str
    op: str
    dtypes: str
    rule: str

    def __str__(self) -> str:
        place = f"module {self.module!r}: " if self.module else ""
        return f"{place}{self.op}  {self.dtypes}  {self.rule or 'no rule'}"


@dataclass(frozen=True)
class PlannedGraph:
    """One graph.

    Attributes:
        training: Whether the model was in training mode.
        grad: Whether gradients were recorded.
        inputs: dtype and sizes of each input: ``f32[s0, 16]``.
        hash: SHA-256 of the graph's text, in hexadecimal.
        operators: What it calls, casts included.
    """

    training: bool
    grad: bool
    inputs: tuple[str, ...]
    hash: str
    operators: tuple[PlannedOperator, ...]

    def is_for_calls_of(self, other: PlannedGraph) -> bool:
        """Whether *other* serves calls of the same kind: mode, and dtype and dimensions of the inputs."""
        return (self.training, self.grad, *map(_kind, self.inputs)) == (
            other.training,
            other.grad,
            *map(_kind, other.inputs),
        )

    def differences(self, other: PlannedGraph) -> tuple[str, ...]:
        """What *other* has instead: ``-`` a line of this graph, ``+`` one of the other's."""
        if self.hash == other.hash:
            return ()
        mine, its = ([str(operator) for operator in graph.operators] for graph in (self, other))
        found = [line for line in difflib.ndiff(mine, its) if line.startswith(("- ", "+ "))]
        return tuple(found) or ("the same operators and dtypes in another arrangement, or of other sizes",)


def _kind(text: str) -> tuple[str, int]:
    dtype, _, sizes = text.rstrip("]").partition("[")
    return dtype, len(sizes.split(",")) if sizes else 0


@dataclass(frozen=True)
class Plan:
    """What a plan file holds.

    Attributes:
        torch: The version of torch that it was made with.
        policy: The policy, as ``Policy.to_json`` writes it.
        graphs: The graphs, one for each kind of call that was captured.
    """

    torch: str
    policy: str
    graphs: tuple[PlannedGraph, ...]

    def differences(self, graph: PlannedGraph) -> tuple[str, ...]:
        """How *graph* differs from the nearest one of the plan; ``()`` if it has none for such calls."""
        alike = [planned for planned in self.graphs if planned.is_for_calls_of(graph)]
        found = [planned.differences(graph) for planned in alike]
        return min(found, key=len) if found else ()

    def to_json(self) -> str:
        """The text of the file."""
        data: dict[str, Any] = {"format": _FORMAT, "torch": self.torch, "policy": json.loads(self.policy)}
        data["graphs"] = [asdict(graph) for graph in self.graphs]
        return json.dumps(data, indent=1)

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        target = Path(path)
        draft = target.with_name(f"{target.name}.part")
        draft.write_text(self.to_json())
        draft.replace(target)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan that :meth:`write` wrote.

        Raises:
            PolicyError: The file holds something else.
        """
        try:
            data = json.loads(Path(path).read_text())
            _check_format(data["format"])
            graphs = tuple(_graph(item) for item in data["graphs"])
            return cls(data["torch"], json.dumps(data["policy"], indent=1), graphs)
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(
                f"{path} is no plan of this fxamp ({error!r})\n  write one with amp.plan().write(path)"
            ) from error


def _check_format(text: str) -> None:
    if text != _FORMAT:
        raise ValueError(text)


def _graph(data: dict[str, Any]) -> PlannedGraph:
    operators: Iterable[dict[str, str]] = data["operators"]
    return PlannedGraph(
        training=data["training"],
        grad=data["grad"],
        inputs=tuple(data["inputs"]),
        hash=data["hash"],
        operators=tuple(PlannedOperator(**operator) for operator in operators),
    )
