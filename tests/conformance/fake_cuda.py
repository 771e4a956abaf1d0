"""Eager CUDA autocast and the converted graph, both on fake CUDA tensors: which operators get which dtypes.

Torch's own CUDA autocast runs without a GPU if the tensors are fake.  Every operator that arrives below it is
logged with the dtypes of its tensors, once while the model's Python runs under eager autocast, once while the
rewritten graph runs without.  Casts taken out, both logs must be the same, and the graph may not make more
casts.  It needs a CUDA build of torch, no GPU; what the graph was captured on is the CPU.

cuDNN's recurrent networks cannot run on fake tensors; they are in ``CUDNN_ONLY``, with what the source says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.capture.capture import capture, plain_saved_tensors
from fxamp.capture.structure import flatten
from fxamp.capture.symbols import Sizes
from fxamp.ir.regions import Region
from fxamp.passes import build_pipeline, run_passes
from fxamp.policy import Policy
from fxamp.policy.scopes import place
from fxamp.runtime.build_program import graph_module

__all__ = ["CUDNN_ONLY", "Comparison", "compare", "has_cuda_build"]

CUDNN_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "RNN": "_cudnn_rnn casts input, hx, cx and the flat weights to float16, in a bfloat16 region too",
        "LSTM": "as RNN (aten/src/ATen/cudnn/AutocastRNN.cpp)",
        "GRU": "as RNN",
    }
)
_CASTS = frozenset({"aten::_to_copy"})
_IGNORED = ("prim::", "aten::sym_", "aten::is_", "aten::dim", "aten::numel", "aten::lift_fresh")
_LOGGED_PASSES = (
    "flatten-regions", "expand-composites", "propagate-dtypes", "classify", "resolve-promotes",
    "insert-casts", "keep-reentrant", "verify",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One operator that arrived below autocast."""

    op: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(self.inputs)})"


@dataclass
class Comparison:
    """What the two logs have.

    Attributes:
        operators: How many operators were compared.
        casts: How many casts eager autocast makes, and how many the graph makes.
        difference: Where they first part; ``""`` if they are the same.
        skipped: Why nothing was compared; ``""`` if it was.
    """

    operators: int = 0
    casts: tuple[int, int] = (0, 0)
    difference: str = ""
    skipped: str = ""


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[Row] = []
        self.casts = 0
        self._open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        dtypes = tuple(leaf.dtype.abbr for leaf in leaves if isinstance(leaf, torch.Tensor))
        if func.name() in _CASTS:
            self.casts += result.dtype is not args[0].dtype
        elif self._open and not func.name().startswith(_IGNORED):
            self.rows.append(Row(func.name(), dtypes))
        return result

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing is logged inside."""
        self._open = False
        try:
            yield
        finally:
            self._open = True


@dataclass
class _Fakes:
    """Fake CUDA twins of real tensors, one each."""

    mode: FakeTensorMode
    twins: dict[int, torch.Tensor] = field(default_factory=dict)
    held: list[torch.Tensor] = field(default_factory=list)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.twins:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            twin: Any = FakeTensor(self.mode, meta, torch.device("cuda", 0))
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            else:
                twin.requires_grad_(tensor.requires_grad)
            self.twins[id(tensor)] = twin
            self.held.append(tensor)
        return self.twins[id(tensor)]

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of *model* with the twins of its tensors."""
        tensors = [*model.parameters(), *model.buffers()]
        return copy.deepcopy(model, {id(tensor): self.of(tensor) for tensor in tensors})

    def values(self, values: Any) -> Any:
        return pytree.tree_map(lambda v: self.of(v) if isinstance(v, torch.Tensor) else v, values)


def has_cuda_build() -> bool:
    """Whether this torch can make fake CUDA tensors."""
    return torch.version.cuda is not None


def compare(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], low: torch.dtype) -> Comparison:
    """Both logs of ``model(*args, **kwargs)``, a model on the CPU, in the gradient mode that is on."""
    torch._C._ensureCUDADeviceGuardSet()
    fakes = _Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    try:
        eager = _log_of_eager(model, args, kwargs, low, fakes)
    except Exception as error:  # noqa: BLE001  no GPU here: what fakes cannot do is not compared
        return Comparison(skipped=f"eager: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    module, leaves = _converted(model, args, kwargs, low)
    graph = _log_of_graph(module, [fakes.of(leaf) for leaf in leaves], fakes)
    return Comparison(len(eager.rows), (eager.casts, graph.casts), _difference(eager, graph))


@contextmanager
def _cuda_autocast(low: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", low)
    torch.set_autocast_enabled("cuda", True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def _log_of_eager(model: nn.Module, args: Any, kwargs: Any, low: torch.dtype, fakes: _Fakes) -> _Log:
    twin = fakes.model(model)
    given, named = fakes.values((tuple(args), dict(kwargs)))
    log = _Log()
    with plain_saved_tensors(), fakes.mode, log, _cuda_autocast(low):
        twin(*given, **named)
    return log


def _converted(
    model: nn.Module, args: Any, kwargs: Any, low: torch.dtype
) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph after the passes that decide and insert, dead code included."""
    policy = Policy.native("cuda", low).on("cpu")
    spec, leaves = flatten((tuple(args), dict(kwargs)))
    region = Region("cpu", enabled=True, dtype=low)
    with mock.patch("fxamp.capture.capture.tracer_unseen", nullcontext):  # as eager on fakes, which sees them
        captured = capture(model, spec, leaves, region, Sizes.FIXED, placed=place(policy, model))
    module = graph_module(captured.graph, captured.sources, model, captured.blocks)
    with plain_saved_tensors():
        run_passes(module, [step for step in build_pipeline(captured, policy) if step.name in _LOGGED_PASSES])
    return module, leaves


class _OnCuda(Interpreter):
    """Runs a graph that was captured on the CPU on CUDA."""

    def __init__(self, module: GraphModule, fakes: _Fakes, log: _Log) -> None:
        super().__init__(module)
        self._fakes, self._log = fakes, log

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        with self._log.closed():
            return self._fakes.of(value) if isinstance(value, torch.Tensor) else value

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.aten.clone.default and str(n.args[0]).startswith("_constant"):
            with self._log.closed():  # torch.tensor(...) of the model's Python
                return super().run_node(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_aggregate((args, kwargs), _moved)
        return super().call_function(target, args, kwargs)


def _moved(value: Any) -> Any:
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return torch.device("cuda", 0) if is_cpu else value


def _log_of_graph(module: GraphModule, inputs: list[torch.Tensor], fakes: _Fakes) -> _Log:
    log = _Log()
    with plain_saved_tensors(), fakes.mode, log:
        _OnCuda(module, fakes, log).run(*inputs)
    return log


def _difference(eager: _Log, graph: _Log) -> str:
    for index, (one, other) in enumerate(zip(eager.rows, graph.rows, strict=False)):
        if one != other:
            return f"operator {index}: eager {one}, converted {other}"
    if len(eager.rows) != len(graph.rows):
        return f"eager calls {len(eager.rows)} operators, the converted graph {len(graph.rows)}"
    if graph.casts > eager.casts:
        return f"eager makes {eager.casts} casts, the converted graph {graph.casts}"
    return ""
