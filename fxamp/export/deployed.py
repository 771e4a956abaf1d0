"""A frozen program as a plain module, which the exporters of torch take.

The module has the model's signature, its names of weights and the structure of its results; what it runs is
the rewritten graph, with autocast off around it, so that an ambient region of the caller's does not cast a
second time.  Its weights are the frozen ones: each in the dtype that the graph reads it in.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture.recorder import set_grad_enabled
from fxamp.capture.structure import flatten, mutable_objects, set_contents, unflatten
from fxamp.errors import ExportError, ExportWarning
from fxamp.export.contract import Contract, Port
from fxamp.export.results import portable, replaced_classes
from fxamp.ir.region_code import RegionCode, is_named
from fxamp.ir.where import locate
from fxamp.runtime.frozen_module import FrozenModule
from fxamp.runtime.program import Program

__all__ = ["Deployed", "deploy", "module_of"]

_ASKS_DYNAMO = "it asks Dynamo itself (torch.cond, while_loop, a compiled function), and runs as it is"
_SETTLED = "the model sets attributes in its first call; this is what it does in the later ones"
_SEEN = "the model reads values of tensors; here it goes the way that it has for exporters"


@dataclass(frozen=True, eq=False)
class Deployed:
    """What an exporter is given.

    Attributes:
        module: The module; called as the model is.
        graph_module: The rewritten graph that it runs.
        args: The example, in the dtypes of the contract.
        kwargs: Likewise.
        inputs: The tensors that go in, in order.
        outputs: The tensors that come out.
        frozen: The frozen model that it was made from.
        program: The program of it.
        contract: Which dtypes were chosen.
        plain: Whether the model itself knows nothing of the low precision dtype.
        findings: Weights and constants that do not fit the low precision dtype, a line each.
        clamped: Whether they were changed, so that the graph gives other bits than the frozen model.
        original: The frozen model as it runs where no exporter is seen, if that is no single graph.
        settled: Whether the model had to be called once for its attributes to stay as they are.
    """

    module: nn.Module
    graph_module: GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    frozen: FrozenModule
    program: Program
    contract: Contract
    plain: bool
    findings: tuple[str, ...] = ()
    clamped: bool = False
    original: FrozenModule | None = None
    settled: bool = False

    @property
    def device_type(self) -> str:
        """Whose autocast."""
        return self.frozen._options.policy.device_type

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from the model, a line each."""
        assert self.program.result is not None
        found = [*replaced_classes(self.program.result)]
        found += [_SETTLED] * self.settled + [_SEEN] * (self.original is not None)
        return tuple(found)

    @property
    def low(self) -> torch.dtype:
        """The low precision dtype."""
        return self.frozen._options.policy.low

    def reference(self) -> list[Any]:
        """The leaves of what the frozen model gives for the example, in the dtypes of the contract.

        Random operators draw from seed 0.  The buffers that the call writes to are put back.
        """
        if self.clamped:
            return self.of_graph()
        args, kwargs = self.in_model_dtypes()
        model = self.original or self.frozen
        buffers = dict(model.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            result = pytree.tree_leaves(portable(model(*args, **kwargs)))
            for name, buffer in before.items():
                buffers[name].copy_(buffer)
        return [self._as_agreed(value) for value in result]

    def in_model_dtypes(self) -> tuple[Any, Any]:
        """The example as the model takes it; copies, which a call may write to."""
        spec, leaves = flatten((self.args, self.kwargs))
        wide = [_own(leaf, port.model) for leaf, port in zip(leaves, self.inputs, strict=True)]
        args, kwargs = unflatten(spec, wide, [])
        return args, kwargs

    def of_graph(self) -> list[Any]:
        """Likewise as :meth:`reference`, what the graph gives that is exported."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            return pytree.tree_leaves(copy.deepcopy(self.module)(*args, **kwargs))

    def _as_agreed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.contract.output_dtype(value.dtype, self.low, plain=self.plain))


def deploy(frozen: FrozenModule, args: Sequence[Any], kwargs: dict[str, Any], contract: Contract) -> Deployed:
    """The module that runs *frozen* for calls like this one.

    Args:
        frozen: A frozen model.
        args: Positional arguments of a call, in the dtypes that the model takes.
        kwargs: Keyword arguments of it.
        contract: Which dtypes the artifact takes and gives.

    Raises:
        ExportError: The call is no single graph, or changes what an artifact cannot reach.
    """
    program = _whole(frozen, args, kwargs)
    low = frozen._options.policy.low
    graph = _copied(program.module.graph)
    _write_back(graph, program, frozen._tree)
    plain = _knows_no(low, frozen, (args, kwargs))
    inputs, outputs = contract.write(graph, low, plain=plain)
    graph_module = _with_weights(graph, program.module, dict(frozen._tree.named_parameters()))
    spec, leaves = flatten((tuple(args), dict(kwargs)))
    cast = [leaf.to(contract.input_dtype(leaf.dtype, low)) for leaf in leaves]
    new_args, new_kwargs = unflatten(spec, cast, [])
    return Deployed(
        module=_module(graph_module, program, frozen._tree, frozen._options.policy.device_type),
        graph_module=graph_module,
        args=new_args,
        kwargs=new_kwargs,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        frozen=frozen,
        program=program,
        contract=contract,
        plain=plain,
    )


def _own(leaf: torch.Tensor, dtype: str) -> torch.Tensor:
    """A copy, which a call may write to."""
    return leaf.detach().clone().to(getattr(torch, dtype))


def _whole(frozen: FrozenModule, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    frozen.capture(*args, **kwargs)
    runner, name = frozen._runner, type(frozen._tree).__name__
    if runner.last is None and not runner.failures:  # it reads values, and has to be run to say where
        copied_args, copied_kwargs = copy.deepcopy((tuple(args), kwargs))
        with torch.no_grad():
            frozen(*copied_args, **copied_kwargs)
    segments = [program for program in runner.all_programs() if program.operator is not None]
    program = runner.last or next(iter(segments), None)
    if program is None:
        failures = runner.failures.values()
        whys = [_ASKS_DYNAMO if failure.whole else failure.reason.strip() for failure in failures]
        reasons = "; ".join(dict.fromkeys(whys))
        raise ExportError(
            f"{name} is no single graph, and an artifact is one: {reasons}\n"
            "  export the modules in it that are one (the report of the converted model names the others), "
            "or wrap that part in a custom operator:  torch.library.custom_op"
        )
    if program.operator is not None:
        raise ExportError(
            f"{name} is no single graph, and an artifact is one: it reads the value of a tensor to decide "
            f"what runs next, by {_last_place(program)}\n"
            "  decide with tensors (torch.where), or wrap that part in a custom operator"
        )
    if program.changed and not _returns_objects(program):
        raise ExportError(
            f"{name} writes into a list, dict or object that it is given, and an artifact gives results only"
            "\n  let the model return what it has changed"
        )
    return program


def _last_place(program: Program) -> str:
    """Which operator gives the value, at which line."""
    assert program.operator is not None
    nodes = program.operator.module.graph.nodes
    return locate([node for node in nodes if node.op == "call_function"][-1])


def _returns_objects(program: Program) -> bool:
    assert program.result is not None
    return "again" in str(program.result[1][0])


def _knows_no(low: torch.dtype, frozen: FrozenModule, call: Any) -> bool:
    tensors = [*frozen._tree.parameters(), *frozen._tree.buffers(), *flatten(call)[1]]
    return not any(tensor.dtype is low for tensor in tensors)


def _copied(graph: Graph) -> Graph:
    """A copy without the switches of whether gradients are recorded."""
    copied = Graph()
    values: dict[Node, Node] = {}
    result = copied.graph_copy(graph, values)
    output = copied.output(result)
    output.meta = dict(graph.output_node().meta)
    for node in list(copied.nodes):
        if node.target is set_grad_enabled:
            copied.erase_node(node)
    return copied


def _write_back(graph: Graph, program: Program, model: nn.Module) -> None:
    """Copy into each buffer what the call binds to it; plain attributes stay as they are, with a warning."""
    bound = program._write_back
    if not bound:
        return
    output = graph.output_node()
    values: Any = output.args[0]
    for (slots, name), value in zip(bound, values[len(values) - len(bound) :], strict=True):
        paths = [path for path, module in model.named_modules() if module._buffers is slots]
        if not paths:
            message = (
                f"the model keeps a tensor in the attribute {name!r} in every call; the artifact does not\n"
                "  return the tensor if it is wanted, or make it a buffer:  self.register_buffer(...)"
            )
            warnings.warn(message, ExportWarning, stacklevel=2)
            continue
        target = f"{paths[0]}.{name}" if paths[0] else name
        _copy_into(graph, target, slots[name], value)
    output.args = (tuple(values[: len(values) - len(bound)]),)


def _copy_into(graph: Graph, target: str, buffer: torch.Tensor, value: Node) -> None:
    fact = value.meta["fact"]
    if fact.dtype is not buffer.dtype or tuple(fact.shape) != tuple(buffer.shape):
        raise ExportError(
            f"forward puts a tensor of another dtype or shape into the buffer {target!r}: {fact}, which was "
            f"{buffer.dtype} {tuple(buffer.shape)}; an artifact's buffers stay as they are\n"
            "  give the buffer its final dtype and shape before the export"
        )
    held = next((node for node in graph.nodes if node.op == "get_attr" and node.target == target), None)
    if held is None:
        with graph.inserting_before(next(iter(graph.nodes))):
            held = graph.get_attr(target)
        held.meta["fact"] = fact
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.copy_.default, (held, value)).meta["fact"] = fact


def _with_weights(graph: Graph, source: GraphModule, parameters: dict[str, Any]) -> GraphModule:
    """*graph* with the weights of *source*; a rounded one by the name of the weight, where that is free."""
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        value = _attribute(source, str(node.target))
        rounded = node.meta.get("rounded")
        name = rounded[0] if rounded is not None and rounded[0] not in used else str(node.target)
        is_weight = name in parameters or rounded is not None or _is_of(node, parameters)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and is_weight:
            value = nn.Parameter(value.detach(), requires_grad=False)
        attributes[name] = value
        node.target = name
    module = GraphModule(attributes, graph, class_name="AmpGraph")
    if any(is_named(value) for node in graph.nodes for value in node.args):
        graph.set_codegen(RegionCode(graph))
        module.recompile()
    return module


def _is_of(node: Node, parameters: dict[str, Any]) -> bool:
    """Whether *node* is what was computed from a weight, which may be a rounded copy of one."""
    if "derived" not in node.meta:
        return False
    sources = node.meta["derived"].graph.find_nodes(op="get_attr")
    return any("rounded" in source.meta or source.target in parameters for source in sources)


def _attribute(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def module_of(graph_module: GraphModule, deployed: Deployed) -> nn.Module:
    """The module of *deployed* with another graph."""
    return _module(graph_module, deployed.program, deployed.frozen._tree, deployed.device_type)


def _module(graph_module: GraphModule, program: Program, model: nn.Module, device_type: str) -> nn.Module:
    """A module with the weights of *graph_module* as its own, and the signature of *model*."""
    module = _Whole(graph_module, program, device_type)
    forward: Callable[..., Any] = module.forward

    def signed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    signed.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    module.__dict__["forward"] = signed
    return module.eval()


class _Whole(nn.Module):
    settings: tuple[Callable[..., Any], Program, str]

    def __init__(self, graph_module: GraphModule, program: Program, device_type: str) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers"):
            self.__dict__[kind] = dict(graph_module.__dict__[kind])
        self.__dict__["settings"] = type(graph_module).forward, program, device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = flatten((args, kwargs))[1]
        run, program, device_type = self.settings
        if not program.guard.holds(leaves):  # while torch.export traces this, a condition on symbolic sizes
            raise ExportError("the sizes of the call are others than those that the model was captured for")
        with torch.autocast(device_type, enabled=False):
            outputs = run(self, *leaves)
        return _result(program, outputs, (args, kwargs))


def _result(program: Program, outputs: Sequence[Any], call: Any) -> Any:
    assert program.result is not None
    objects = mutable_objects(call) if program.refers else []
    result = unflatten(program.result, list(outputs), objects)
    if not program.changed:
        return portable(result)
    for index, now in zip(program.changed, result[1], strict=True):
        set_contents(objects[index], now)
    return portable(result[0])
