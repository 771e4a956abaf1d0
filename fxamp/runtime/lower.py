"""From a graph to flat code: one Python function, a line an operator, no attribute look-ups.

The function takes the inputs and the list of tensors that the graph's ``get_attr`` nodes stand for, calls
builtins directly, and drops each value after its last use, as eager code that leaves a scope does.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxamp.capture.recorder import set_grad_enabled
from fxamp.ir.blocks import is_block, is_source
from fxamp.ir.operators import TO_DTYPE
from fxamp.ir.regions import Region, run_in_region, runner_in_region
from fxamp.ir.text import tuple_text
from fxamp.ir.where import Where
from fxamp.runtime.cast_scope import CastScope
from fxamp.runtime.direct_call import direct_call

__all__ = ["FLAT_CODE", "ORIGINS", "FlatCode", "lower"]

FLAT_CODE = "<fxamp flat code>"
"""The file name of flat code in frames."""

ORIGINS = "__origins__"
"""A global of flat code: for each line that calls an operator, its node's name and where that comes from."""

_CAST_METHODS = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float32: "float"}
_ARITHMETIC = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//"}
_EQUAL_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, float, complex)

_INDEX = torch.ops.aten.index.Tensor
_SIZES = {torch.ops.aten.sym_size.int: "size", torch.ops.aten.sym_stride.int: "stride"}


@dataclass(frozen=True)
class FlatCode:
    """A lowered graph.

    Attributes:
        text: The source, for people.
        run: ``run(inputs, tensors)`` gives the outputs as a tuple; *tensors* in the order of the graph's
            ``get_attr`` nodes.
        consumes: Whether it empties the list of inputs.
    """

    text: str
    run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[Any, ...]]
    consumes: bool = False


def lower(
    graph: Graph,
    keep_cast: Callable[..., torch.Tensor] | None = None,
    calls: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
    *,
    consumes: bool = False,
) -> FlatCode:
    """Write *graph* as flat code.

    Args:
        graph: A graph that the verifier accepts.
        keep_cast: Called as ``keep_cast(tensor, dtype)`` for the casts that eager keeps for the length of a
            region; used where several programs run inside one region and share those casts.
        calls: What is called for some nodes instead of their operators, with the same arguments.
        consumes: Whether the list of inputs is emptied, so that nobody but the code holds them.
    """
    writer = _Writer(graph, keep_cast, calls, consumes)
    text = writer.write()
    scope = dict(writer.scope)
    scope[ORIGINS] = writer.origins
    exec(compile(text, FLAT_CODE, "exec"), scope)
    return FlatCode(text, scope["run"], consumes)


@dataclass
class _Writer:
    graph: Graph
    keep_cast: Callable[..., torch.Tensor] | None
    calls: Mapping[Node, Callable[..., Any]]
    consumes: bool
    scope: dict[str, Any] = field(default_factory=dict)
    names: dict[Node, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    constants: dict[Any, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    owners: dict[int, Node] = field(default_factory=dict)
    origins: dict[int, tuple[str, Where | None]] = field(default_factory=dict)

    def write(self) -> str:
        last_uses = _last_uses(self.graph)
        for node in self.graph.nodes:
            self.names[node] = f"{node.name}_" if keyword.iskeyword(node.name) else node.name
        self.taken = {*self.names.values(), "run", "inputs", "tensors", "grad"}
        inputs = [self.names[n] for n in self.graph.nodes if n.op == "placeholder"]
        tensors = [self.names[n] for n in self.graph.nodes if is_source(n)]
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if is_block(node):
                    self.names[node] = self._block(node)
                continue
            self.owners[len(self.lines)] = node
            self.lines.append(self._statement(node))
            dead = [self.names[used] for used in last_uses.get(node, ()) if not is_block(used)]
            if dead and node.op != "output":
                self.lines.append(f"del {', '.join(dead)}")
        arguments = ((inputs, "inputs"), (tensors, "tensors"))
        head = [f"{tuple_text(names)} = {source}" for names, source in arguments if names]
        head += ["inputs.clear()"] if self.consumes and inputs else []
        body = self._body()
        before = 2 + len(head) + (0 if body is self.lines else 2)  # lines are counted from 1
        self.origins = {
            before + index: (node.name, node.meta.get("where")) for index, node in self.owners.items()
        }
        lines = [f"    {line}\n" for line in (*head, *body)]
        return "".join(["def run(inputs, tensors):\n", *lines])

    def _body(self) -> list[str]:
        if not any(node.target is set_grad_enabled for node in self.graph.nodes):
            return self.lines
        self.scope["is_grad_enabled"] = torch.is_grad_enabled
        self.scope["set_grad_enabled"] = set_grad_enabled
        inside = [f"    {line}" for line in self.lines]
        return ["grad = is_grad_enabled()", "try:", *inside, "finally:", "    set_grad_enabled(grad)"]

    def _statement(self, node: Node) -> str:
        if node.op == "output":
            return f"return {self._text(tuple(node.args[0]))}"  # type: ignore[arg-type]
        if node.target is set_grad_enabled:
            return f"set_grad_enabled({node.args[0]})"
        call = self._call(node)
        return f"{self.names[node]} = {call}" if node.users else call

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{node.args[1]}]"
        if node.target in _SIZES:
            return f"{self._text(node.args[0])}.{_SIZES[node.target]}({node.args[1]})"
        if node.target is _INDEX and _is_indexing(node):
            return f"{self._text(node.args[0])}[{', '.join(map(self._text, node.args[1]))}]"  # type: ignore[arg-type]
        if node.target in _ARITHMETIC and len(node.args) == 2:
            one, other = (self._text(arg) for arg in node.args)
            return f"({one} {_ARITHMETIC[node.target]} {other})"
        if node.target is TO_DTYPE and "inserted" in node.meta and len(node.args) == 2:
            return self._cast(node)
        given = node.args[2:] if _is_in_region(node) else node.args
        values = [self._text(arg) for arg in given]
        values += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return f"{self._function(node)}({', '.join(values)})"

    def _block(self, node: Node) -> str:
        """The name of the function that runs a block, on whose casts the blocks and the graph agree."""
        module: Any = self.graph.owning_module
        code = lower(getattr(module, str(node.target)).graph, self.keep_cast)

        def block(*inputs: Any) -> Any:
            with CastScope():
                return code.run(inputs, ())

        return self._constant(block, str(node.target))

    def _cast(self, node: Node) -> str:
        value, dtype = node.args
        if self.keep_cast is not None and node.meta.get("kept"):
            self.scope["keep_cast"] = self.keep_cast
            return f"keep_cast({self._text(value)}, {self._text(dtype)})"
        assert isinstance(dtype, torch.dtype)
        return f"{self._text(value)}.{_CAST_METHODS[dtype]}()"

    def _function(self, node: Node) -> str:
        target: Any = self.calls.get(node, node.target)
        if not _is_in_region(node):
            called = _direct(target, node.args, node.kwargs)
            return self._constant(called, _name_of(called))
        region: Any
        region, in_it, *args = node.args
        called = _direct(in_it, args, node.kwargs)
        return self._constant(runner_in_region(region, called), f"{_name_of(called)}_in_region")

    def _constant(self, value: Any, name: str) -> str:
        key = (type(value), str(value)) if isinstance(value, _EQUAL_BY_TEXT) else id(value)
        if key not in self.constants:
            while name in self.scope or name in self.taken or keyword.iskeyword(name):
                name = f"{name}_"
            self.constants[key] = name
            self.scope[name] = value
        return self.constants[key]

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, tuple):
            return tuple_text([self._text(item) for item in value])
        if isinstance(value, list):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        name = str(value).rpartition(".")[2] if isinstance(value, torch.dtype) else "constant"
        return self._constant(value, name)


def _is_in_region(node: Node) -> bool:
    """Whether *node* is an operator in a state of torch's own autocast."""
    region: Any = node.args[0] if node.target is run_in_region else None
    return type(region) is Region


def _is_indexing(node: Node) -> bool:
    """Whether what *node* picks is what Python's indexing picks: a number of no dimension is read by that."""
    indices: Any = node.args[1] if len(node.args) == 2 and not node.kwargs else ()
    facts = [each.meta.get("fact") if isinstance(each, Node) else None for each in indices]
    return bool(facts) and all(fact is not None and len(fact.shape) > 0 for fact in facts)


def _direct(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What *target* is called by with the least overhead."""
    if not isinstance(target, OpOverload):
        return target
    args, kwargs = map_arg((tuple(args), dict(kwargs)), _kind)
    return direct_call(target, tuple(args), dict(kwargs)) or target


def _name_of(called: Any) -> str:
    return str(getattr(called, "__name__", "function")).replace(".", "_")


def _kind(node: Node) -> Any:
    """What stands for *node* when a builtin is probed: any tensor, or any number."""
    if node.meta.get("fact") is not None:
        return torch.Tensor
    return float if isinstance(node.meta.get("number"), torch.SymFloat) else int


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the values that are not needed after it."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last
