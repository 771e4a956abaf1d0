"""Share the casts of one value: one for each dtype.

Before: eager autocast casts an activation anew for every use (``q``, ``k`` and ``v`` of one ``LayerNorm``).
After:  the first cast serves the later ones of the same value to the same dtype.

Exact for training where no gradient flows through the cast; elsewhere exact for inference only, since the
uses' gradients would be added up in the low dtype, and not in that of the value.  Condition: nobody writes
to the value between the two casts, nor to either result, and no output of the graph has either one.  The
one cast of a weight that eager autocast keeps itself is left as it is, writes or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.memory import Memory
from fxamp.ir.operators import is_plain_cast
from fxamp.passes.clean_up import CleanUp

__all__ = ["ShareCasts"]


@dataclass(frozen=True)
class ShareCasts(CleanUp):
    """No value has two casts to one dtype that the level lets be one."""

    name: ClassVar[str] = "share-casts"
    condition: ClassVar[str] = "nobody writes to the value in between, or to the casts"

    def run(self, graph: Graph) -> bool:
        casts = [node for node in graph.nodes if is_plain_cast(node) and not node.meta.get("kept")]
        groups: dict[tuple[Node, torch.dtype], list[Node]] = {}
        for cast in casts:
            groups.setdefault((cast.args[0], cast.meta["fact"].dtype), []).append(cast)
        if len(groups) == len(casts):
            return False
        memory = Memory(graph)
        changed = [self._share(graph, group, memory) for group in groups.values() if len(group) > 1]
        return any(changed)

    def _share(self, graph: Graph, casts: list[Node], memory: Memory) -> bool:
        first, changed = casts[0], False
        for cast in casts[1:]:
            if not self.may_touch(first, cast):
                return changed
            if not self.may_share(first, cast, memory):
                first = cast
                continue
            self.note(graph, cast, f"shared with %{first.name}")
            cast.replace_all_uses_with(first)
            graph.erase_node(cast)
            changed = True
        return changed

    def may_share(self, first: Node, cast: Node, memory: Memory) -> bool:
        """Whether *first* may serve the uses of *cast*, a later cast of the same value."""
        value = first.args[0]
        assert isinstance(value, Node)
        unwritten = not memory.is_written_between(value, first, cast)
        return unwritten and memory.is_private(first) and memory.is_private(cast)
