"""What a CUDA graph asks of a frozen module, shown as far as it can be without a GPU, and then on one.

A graph records kernels and addresses, and replays them.  So a call must read no value back to the host, copy
nothing between devices, read its weights at the same addresses each time, and dispatch the same kernels
whatever the state of the thread is.  The first is seen on the meta device, which has no values to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from tests.models import SmallCNN, equal

LOW = [torch.float16, torch.bfloat16]


class Decoder(nn.Module):
    """One step of a decoder that gets keys and values, and gives them with one more."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """*x*: ``(batch, 1, width)``; *keys*, *values*: ``(batch, 1, length, width)``."""
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        attended = functional.scaled_dot_product_attention(q, keys, values)
        return x + self.out(attended.squeeze(1)), keys, values


class Language(nn.Module):
    """Tied embedding and head, a buffer of positions, causal attention."""

    positions: Tensor

    def __init__(self, words: int = 30, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(64, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Logits ``(batch, length, words)`` and the mean state of *tokens*."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return {"logits": self.head(x), "mean": x.mean(1)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "CNN": (SmallCNN, lambda: (torch.randn(2, 3, 8, 8),)),
    "language": (Language, lambda: (torch.randint(0, 30, (2, 5)),)),
    "decoder": (Decoder, lambda: (torch.randn(2, 1, 16), *torch.randn(2, 2, 1, 7, 16).unbind(0))),
}
each_model = pytest.mark.parametrize("name", MODELS)


def _frozen(name: str, device_type: str = "cpu", device: str = "cpu", low: torch.dtype = LOW[1]) -> Any:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, args = make().eval().to(device), tuple(each.to(device) for each in inputs())
    return fxamp.freeze(fxamp.convert(model, device_type=device_type, dtype=low), args), model, args


@cache
def _ready(name: str) -> Any:
    """The same one for all tests that only call it, which changes nothing."""
    return _frozen(name)


class Kernels(TorchDispatchMode):
    """What is dispatched, with dtypes and devices, and which storages are read that no operator here made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []
        self.read: dict[int, int] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.calls.append((func.name(), *((t.dtype, t.device, tuple(t.shape)) for t in tensors)))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self.read[storage._cdata] = storage.data_ptr()
        result = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor):
                self._made.add(made.untyped_storage()._cdata)
        return result


def _kernels(frozen: Any, args: tuple[Tensor, ...]) -> Kernels:
    with Kernels() as seen:
        frozen(*args)
    assert isinstance(seen, Kernels)
    return seen


# --- no value is read -------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("low", LOW, ids=str)
def test_a_call_reads_no_value_and_stays_on_its_device(name: str, low: torch.dtype) -> None:
    frozen, _, args = _frozen(name, "cuda", "meta", low)
    assert frozen.eager_modules == ()
    seen = _kernels(frozen, args)
    assert {device.type for call in seen.calls for _, device, _ in call[1:]} == {"meta"}
    assert not any("_local_scalar_dense" in call[0] for call in seen.calls)


class Reads(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """*x*, or the product."""
        return torch.as_tensor(self.f(x)) if x.sum() > 0 else x


def test_a_model_that_reads_a_value_is_seen_to_read_it() -> None:
    frozen = fxamp.freeze(fxamp.convert(Reads().eval(), dtype=LOW[1]), (torch.ones(1, 4),))
    seen = _kernels(frozen, (torch.ones(1, 4),))
    assert any("_local_scalar_dense" in call[0] or "is_nonzero" in call[0] for call in seen.calls)


# --- the same addresses -----------------------------------------------------------------------------


@each_model
def test_every_call_reads_the_weights_at_the_same_addresses_and_makes_none(name: str) -> None:
    frozen, _, args = _ready(name)
    frozen(*args)
    own = {id(each): each.data_ptr() for each in (*frozen.parameters(), *frozen.buffers())}
    stored = {*own.values(), *(each.data_ptr() for each in frozen._weights.copies())}
    inputs = {each.data_ptr() for each in args}
    for _ in range(3):
        assert {*_kernels(frozen, args).read.values()} - inputs <= stored
    now = {id(each): each.data_ptr() for each in (*frozen.parameters(), *frozen.buffers())}
    assert now == own


@each_model
def test_the_compiler_takes_the_weights_for_static(name: str) -> None:
    """Else each replay would copy them to where the graph reads them."""
    frozen, _, args = _ready(name)
    found: list[tuple[int, int]] = []

    def compiler(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        context = torch._guards.TracingContext.try_get()
        assert context is not None
        assert context.fw_metadata is not None
        tensors = sum(isinstance(each, Tensor) for each in inputs)
        found.append((tensors, len(context.fw_metadata.static_input_indices)))
        forward = module.forward

        def boxed(values: list[Any]) -> Any:
            return forward(*values)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    torch._dynamo.reset()
    backend: Any = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    with torch.no_grad():
        compiled: Any = torch.compile(frozen, backend=backend, fullgraph=True)
        results = zip(_tensors(compiled(*args)), _tensors(frozen(*args)), strict=True)
        assert all(equal(one, other) for one, other in results)
    ((tensors, static),) = found
    assert tensors - static == len(args)


@each_model
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_is_one_graph_for_the_compiler(name: str, backend: str) -> None:
    frozen, _, args = _ready(name)
    torch._dynamo.reset()
    with torch.no_grad():
        explained = torch._dynamo.explain(frozen)(*args)
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
        compiled: Any = torch.compile(frozen, backend=backend, fullgraph=True)
        results = zip(_tensors(compiled(*args)), _tensors(frozen(*args)), strict=True)
        assert all(equal(one, other) for one, other in results)


# --- the state of the thread ------------------------------------------------------------------------


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _no_cache() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients on": torch.enable_grad,
    "a region": lambda: torch.autocast("cpu", torch.bfloat16),
    "a region of another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a region of another device": lambda: torch.autocast("cuda", torch.float16, enabled=False),
    "a region that is off": lambda: torch.autocast("cpu", enabled=False),
    "no cache of casts": _no_cache,
    "another default dtype": lambda: _default(torch.float64),
}


@each_model
@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_thread_changes_no_kernel(name: str, state: str) -> None:
    frozen, _, args = _ready(name)
    with torch.no_grad():
        frozen(*args)
        expected = _kernels(frozen, args).calls
    with STATES[state]():
        frozen(*args)
        assert _kernels(frozen, args).calls == expected


@each_model
def test_another_thread_dispatches_the_same_kernels(name: str) -> None:
    frozen, _, args = _ready(name)
    frozen(*args)
    expected, found = _kernels(frozen, args).calls, []
    thread = threading.Thread(target=lambda: found.append(_kernels(frozen, args).calls))
    thread.start()
    thread.join()
    assert found == [expected]


@each_model
def test_a_call_in_a_region_leaves_nothing_in_its_cache(name: str) -> None:
    """What it left there would be served to eager code, and a graph would not renew it."""
    frozen, model, args = _ready(name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        frozen(*args)
        after = _kernels(model, args).calls
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert _kernels(model, args).calls == after


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


# --- on a GPU ---------------------------------------------------------------------------------------

on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def _marked(name: str, low: torch.dtype) -> Any:
    return pytest.param(name, low, marks=on_cuda, id=f"{name}-{low}")


on_each_gpu_model = pytest.mark.parametrize(
    ("name", "low"), [_marked(name, low) for name in MODELS for low in LOW]
)


def _expected(model: nn.Module, args: tuple[Tensor, ...], low: torch.dtype) -> list[Tensor]:
    with torch.no_grad(), torch.autocast("cuda", low):
        return _tensors(model(*args))


@on_each_gpu_model
@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_cuda_graph_of_a_frozen_call_replays_with_other_inputs(
    name: str, low: torch.dtype, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    frozen, model, args = _frozen(name, "cuda", "cuda", low)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with around():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # what is captured must have been run
                frozen(*args)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            outputs = _tensors(frozen(*args))
    for _ in range(3):
        others = tuple(each.to("cuda") for each in MODELS[name][1]())
        for arg, other in zip(args, others, strict=True):
            arg.copy_(other)
        graph.replay()
        pairs = zip(outputs, _expected(model, others, low), strict=True)
        assert all(equal(one, other) for one, other in pairs)


@on_each_gpu_model
def test_reduce_overhead_records_a_frozen_module(name: str, low: torch.dtype) -> None:
    """Inductor's kernels round in their own way, so its plain mode is what the bits are compared with."""
    frozen, _, args = _frozen(name, "cuda", "cuda", low)
    torch._dynamo.reset()
    with torch.no_grad():
        frozen(*args)
        plain: Any = torch.compile(frozen, fullgraph=True)
        expected = [each.clone() for each in _tensors(plain(*args))]
        torch._dynamo.reset()
        recorded: Any = torch.compile(frozen, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in _tensors(recorded(*args))]
            assert all(equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
