"""A model that is rebuilt after it was converted runs as eager autocast runs it then."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fxamp
from tests.models import autocast, equal

BF16 = torch.bfloat16


class Net(nn.Module):
    """Linears, a convolution, BatchNorm, a list of blocks, a buffer."""

    mean: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 5)
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        h: Tensor = self.stem(x).mean((2, 3)) - self.mean
        for block in self.blocks:
            h = block(h).relu()
        h = self.one(h) + self.other(h)
        if hasattr(self, "bias"):
            h = h + self.bias
        return self.head(self.drop(h))  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """A linear with a low-rank update beside it, as adapters are put in."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """The linear, and the update."""
        return self.base(x) + self.up(self.down(x)) * self.scaling  # type: ignore[no-any-return]


class Symmetric(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        """Upper triangle, mirrored."""
        return weight.triu() + weight.triu(1).mT


class Widened(nn.Module):
    """A cast to float32, which quantized linears want."""

    def forward(self, x: Tensor) -> Tensor:
        """The cast."""
        return x.float()


class Doubled(nn.Linear):
    """A class to swap in."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice as much."""
        return super().forward(x) * 2


def agree(model: Any, amp: fxamp.AmpModule, x: Tensor, calls: int = 2) -> None:
    """Outputs, gradients and buffers, of each of some calls."""
    for _ in range(calls):
        found = []
        buffers = [buffer.clone() for buffer in model.buffers()]
        for call, scope in ((model, autocast(BF16)), (amp, autocast(torch.float16))):
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.data.copy_(before)
            model.zero_grad()
            torch.manual_seed(0)
            with scope:
                out = call(x)
            if out.requires_grad:
                out.float().square().sum().backward()
            parameters = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            found.append([out.detach(), *parameters, *(buffer.clone() for buffer in model.buffers())])
        assert len(found[0]) == len(found[1])
        for index, (one, other) in enumerate(zip(*found, strict=True)):
            assert equal(one, other), index


def _adapters(model: Any) -> None:
    model.one = LowRank(model.one)
    model.blocks[1] = LowRank(model.blocks[1])


def _without_adapters(model: Any, _: object) -> None:
    model.one = model.one.base
    model.blocks[1] = model.blocks[1].base


def _spectral(model: Any) -> None:
    parametrizations.spectral_norm(model.one)


def _parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.one, "weight", Symmetric())


def _tied(model: Any) -> None:
    model.other.weight = model.one.weight


def _untied(model: Any) -> None:
    model.other.weight = nn.Parameter(model.one.weight.detach().clone())


def _patched(model: Any) -> None:
    linear, forward = model.one, model.one.forward

    def scaled(self: nn.Module, x: Tensor) -> Tensor:
        return forward(x) * 3  # type: ignore[no-any-return]

    linear.forward = types.MethodType(scaled, linear)


def _patched_as_accelerate_does(model: Any) -> None:
    linear = model.one
    linear._old_forward = linear.forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs) + 1

    linear.forward = functools.update_wrapper(functools.partial(new_forward, linear), linear._old_forward)


def _swapped_class(model: Any) -> None:
    model.one.__class__ = Doubled


def _registered(model: Any) -> None:
    model.register_buffer("bias", torch.ones(4))


def _assigned(model: Any) -> None:
    model.load_state_dict(
        {k: torch.randn_like(v.float()).to(v) for k, v in model.state_dict().items()}, assign=True
    )


def _assigned_low(model: Any) -> None:
    model.one.load_state_dict({k: v.to(BF16) for k, v in model.one.state_dict().items()}, assign=True)


def _no_bias(model: Any) -> None:
    model.one.bias = None


def _pruned(model: Any) -> None:
    prune.l1_unstructured(model.one, "weight", 0.5)


def _pruned_for_good(model: Any) -> None:
    prune.l1_unstructured(model.one, "weight", 0.5)
    prune.remove(model.one, "weight")


SURGERY: dict[str, Callable[[Any], object]] = {
    "low-rank adapters": _adapters,
    "another head": lambda m: setattr(m, "head", nn.Linear(4, 7)),
    "a head of another class": lambda m: setattr(m, "head", nn.Identity()),
    "a parametrisation": _parametrized,
    "weight norm": lambda m: parametrizations.weight_norm(m.one),
    "spectral norm": _spectral,
    "orthogonal": lambda m: parametrizations.orthogonal(m.one, use_trivialization=False),
    "frozen": lambda m: m.stem.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "tied": _tied,
    "forward patched": _patched,
    "forward patched as accelerate does": _patched_as_accelerate_does,
    "class swapped": _swapped_class,
    "buffer registered": _registered,
    "bias gone": _no_bias,
    "one child in eval mode": lambda m: m.stem[1].eval(),
    "one dropout in eval mode": lambda m: m.drop.eval(),
    "one layer in bfloat16": lambda m: m.one.to(BF16),
    "all in float64": lambda m: m.double(),
    "another memory format": lambda m: m.to(memory_format=torch.channels_last),
    "state assigned": _assigned,
    "state assigned in bfloat16": _assigned_low,
    "pruned": _pruned,
    "pruned for good": _pruned_for_good,
    "a block more": lambda m: m.blocks.append(nn.Linear(4, 4)),
    "a block less": lambda m: m.blocks.__delitem__(0),
    "blocks in another order": lambda m: setattr(m, "blocks", nn.ModuleList(reversed(m.blocks))),
    "SyncBatchNorm, in eval mode": lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m).eval(),
    "a hook": lambda m: m.one.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda m: m.one.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "other channels": lambda m: setattr(m.stem, "1", nn.GroupNorm(2, 4)),
}


@pytest.mark.parametrize("what", SURGERY)
def test_surgery_is_seen(what: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    SURGERY[what](model)
    x = x.double() if what == "all in float64" else x
    agree(model, amp, x)
    if "hook" not in what and what != "pruned":
        assert amp.eager_modules == ()


UNDONE: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "adapters": (_adapters, _without_adapters),
    "a parametrisation": (_parametrized, lambda m, _: parametrize.remove_parametrizations(m.one, "weight")),
    "weight norm": (
        lambda m: parametrizations.weight_norm(m.one),
        lambda m, _: parametrize.remove_parametrizations(m.one, "weight"),
    ),
    "a patched forward": (_patched, lambda m, _: m.one.__delattr__("forward")),
    "a swapped class": (_swapped_class, lambda m, _: setattr(m.one, "__class__", nn.Linear)),
    "tied weights": (_tied, lambda m, _: _untied(m)),
    "frozen weights": (lambda m: m.requires_grad_(False), lambda m, _: m.requires_grad_(True)),
    "a buffer": (_registered, lambda m, _: delattr(m, "bias")),
    "a hook": (
        lambda m: m.one.register_forward_hook(lambda *args: args[-1] * 2),
        lambda m, handle: handle.remove(),
    ),
    "pruning": (_pruned, lambda m, _: prune.remove(m.one, "weight")),
    "a child's mode": (lambda m: m.stem[1].eval(), lambda m, _: m.stem[1].train()),
}


@pytest.mark.parametrize("what", UNDONE)
def test_surgery_that_is_undone_is_seen_too(what: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 6, 6)
    do, undo = UNDONE[what]
    state = do(model)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    undo(model, state)
    agree(model, amp, x)
    state = do(model)
    agree(model, amp, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch._dynamo's own
def test_a_compiled_child_is_left_to_its_compiler() -> None:
    model, x = Net(), torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    model.one.compile(backend="eager")
    agree(model, amp, x)
    assert amp.eager_modules == ("",)


def test_copies_are_models_of_their_own() -> None:
    model: Any = Net().eval()
    x = torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    copied, pickled = copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))
    stored = io.BytesIO()
    torch.save(amp, stored)
    stored.seek(0)
    for other in (copied, pickled, torch.load(stored, weights_only=False)):
        source = other._source
        assert source is not model
        assert equal(other(x), amp(x))
        source.one = LowRank(source.one)
        source.drop.p = 0.25
        agree(source, other, x)
        assert equal(amp(x), copy.deepcopy(amp)(x))
        agree(model, amp, x)


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_a_quantized_child_runs() -> None:
    model: Any = Net().eval()
    x = torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    with torch.no_grad():
        agree(model, amp, x)
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(model.one), {nn.Linear})
        model.one = nn.Sequential(Widened(), quantized[0])
        agree(model, amp, x)


def test_a_layer_that_eager_cannot_run_gives_its_error() -> None:
    model, x = Net(), torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    model.head.double()
    with pytest.raises(RuntimeError) as expected, autocast(BF16):
        model(x)
    with pytest.raises(RuntimeError) as found:
        amp(x)
    assert str(found.value) == str(expected.value)
    model.head.float()
    agree(model, amp, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_child_runs() -> None:
    model: Any = Net().eval()
    x = torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    model.one = torch.jit.script(model.one)
    with torch.no_grad():
        agree(model, amp, x)
    assert "" in amp.eager_modules


def test_adapters_of_peft_are_seen() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 6, 6)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["one", "blocks.1"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    assert adapted is model
    agree(model, amp, x)
    assert amp.eager_modules == ()
    layers = [module for module in model.modules() if hasattr(module, "enable_adapters")]
    for change in ("disabled", "scaled", "enabled", "merged", "unmerged"):
        for layer in layers:
            if change in ("disabled", "enabled"):
                layer.enable_adapters(change == "enabled")
            elif change == "scaled":
                layer.scaling["default"] = 3.0
            else:
                getattr(layer, change.removesuffix("d").removesuffix("e") + "e")()
        agree(model, amp, x)
    assert amp.eager_modules == ()
