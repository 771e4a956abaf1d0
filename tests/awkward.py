"""Small models that do what capture finds hard, each in the fewest lines that still do it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "make"]

Forward = Callable[..., Any]
Maker = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


class Model(nn.Module):
    """A module whose ``forward`` is a plain function of it; the function is the class's, as usual."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


MODELS: dict[str, tuple[Maker, bool]] = {}
"""By name: what makes the model and its arguments, and whether it is expected to be in a graph whole."""


def make(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model called *name* and its arguments, the same each time."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def _model(
    *args: Callable[[], Any], whole: bool = True, **parts: Callable[[], Any]
) -> Callable[[Forward], Forward]:
    """Enter a ``forward`` function into the table; *args* and *parts* make its arguments and attributes."""

    def enter(forward: Forward) -> Forward:
        cls = type(forward.__name__, (Model,), {"forward": forward})

        def maker() -> tuple[nn.Module, tuple[Any, ...]]:
            model = cls(**{name: part() for name, part in parts.items()})
            return model, tuple(arg() for arg in args)

        MODELS[forward.__name__] = (maker, whole)
        return forward

    return enter


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


def _rows() -> Tensor:
    return torch.randn(6, 4)


def _leaf() -> Tensor:
    return torch.randn(6, 4, requires_grad=True)


def _steps() -> Tensor:
    return torch.randn(5, 3, 4)


def _images() -> Tensor:
    return torch.randn(2, 3, 6, 6)


# --- weights and where their casts are shared ---------------------------------------------------------


@_model(_rows, f=_linear)
def a_weight_used_without_and_with_gradients(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = s.f(x)
    return s.f(x) + y + functional.linear(x, s.f.weight)


@_model(_leaf, f=_linear, g=_linear)
def a_leaf_input_used_three_times(s: Any, x: Tensor) -> Any:
    return s.f(x) + s.g(x) + x @ x.t() @ x


@_model(_leaf, f=lambda: nn.Linear(4, 4).requires_grad_(False))
def a_frozen_weight_used_twice(s: Any, x: Tensor) -> Any:
    return s.f(s.f(x))


@_model(_rows, w=lambda: nn.Parameter(torch.randn(8, 4)))
def views_of_a_weight(s: Any, x: Tensor) -> Any:
    return x @ s.w[:4] + x @ s.w[4:] + x @ s.w.view(2, 4, 4)[0]


@_model(_rows, f=_linear)
def a_weight_changed_between_its_uses(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    with torch.no_grad():
        s.f.weight.mul_(0.5)
    return y.detach() + s.f(x).detach()


@_model(_rows, f=_linear, w=_weight)
def a_weight_used_whole_and_through_einsum(s: Any, x: Tensor) -> Any:
    return torch.einsum("ij,jk->ik", s.f(x), s.w) + x @ s.w


# --- regions -------------------------------------------------------------------------------------------


@_model(_rows, f=_linear, w=_weight, v=_weight)
def regions_inside_regions(s: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        y = s.f(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ s.w
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = y @ s.w + y @ s.w
    return y @ s.v


@_model(_rows, f=_linear)
def python_that_asks_for_the_region(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    return y.to(torch.get_autocast_dtype("cpu")) * 2 if torch.is_autocast_enabled("cpu") else y


# --- recurrent layers, whose C++ code picks a kernel ---------------------------------------------------


@_model(_steps, r=lambda: nn.GRU(4, 6, 2, bidirectional=True, dropout=0.2))
def a_deep_gru(s: Any, x: Tensor) -> Any:
    return s.r(x)


@_model(_steps, r=lambda: nn.LSTM(4, 4))
def an_lstm_used_twice(s: Any, x: Tensor) -> Any:
    return s.r(x)[0] + s.r(x * 2)[0]


@_model(_steps, r=lambda: nn.GRUCell(4, 5))
def a_cell_in_a_loop(s: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[1], 5)
    for step in range(x.shape[0]):
        h = s.r(x[step], h)
    return h


# --- kernels that consult autocast themselves ----------------------------------------------------------


@_model(_images, f=lambda: nn.Conv2d(3, 3, 1), t=lambda: nn.Parameter(torch.eye(2, 3)))
def a_grid_from_a_kernel_that_gives_low_precision(s: Any, x: Tensor) -> Any:
    grid = functional.affine_grid(s.t.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(s.f(x), grid, align_corners=False)


@_model(_rows, _rows, b=lambda: nn.Bilinear(4, 4, 3))
def a_bilinear_layer(s: Any, x: Tensor, y: Tensor) -> Any:
    return s.b(x, y)


@_model(_rows, f=_linear)
def movement_that_is_cat_inside(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    return y.roll(1, 0) + y.flip(0), torch.hstack([y, x]), torch.vstack([y, x]), y.repeat(2, 1)


# --- writes --------------------------------------------------------------------------------------------


@_model(_rows, f=_linear)
def writes_through_views(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    odd = y[:, ::2]
    odd.mul_(2)
    y.view(-1)[0] = 3
    y.t().add_(1)
    return y, odd


@_model(_rows, f=_linear)
def a_mask_assigned(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    y[y > 0] = 0
    return y


@_model(_rows, f=_linear)
def an_input_changed_in_place(s: Any, x: Tensor) -> Any:
    x.add_(1)
    return s.f(x)


@_model(_rows, f=_linear, mean=lambda: torch.zeros(4))
def a_buffer_updated_and_rebound(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    s.mean.lerp_(y.detach().float().mean(0), 0.1)
    s.mean = s.mean * 1.0
    return y - s.mean


# --- tensors made in forward ---------------------------------------------------------------------------


@_model(_rows, f=_linear)
def factories_and_constants(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    y = y + y.new_zeros(4) + y.new_tensor([1.0, 2, 3, 4]) + torch.ones_like(y) + torch.arange(4)
    return y * torch.tensor(3.0).item() + torch.linspace(0, 1, 4)


@_model(_rows, f=_linear)
def stochastic_depth(s: Any, x: Tensor) -> Any:
    keep = torch.empty(x.shape[0], 1).bernoulli_(0.5)
    return x + s.f(x) * keep / 0.5


@_model(_rows, f=_linear)
def sampling(s: Any, x: Tensor) -> Any:
    p = s.f(x).softmax(-1)
    return torch.multinomial(p.float(), 2), torch.bernoulli(p), functional.gumbel_softmax(p, hard=True)


@_model(_rows, f=_linear)
def data_dependent_rows(s: Any, x: Tensor) -> Any:
    return s.f(x[x[:, 0] > 0])


@_model(_rows, f=_linear)
def an_item_used_as_a_number(s: Any, x: Tensor) -> Any:
    return s.f(x) * x.abs().max().item()


@_model(_rows, f=_linear, whole=False)
def an_error_that_eager_catches_too(s: Any, x: Tensor) -> Any:
    try:
        return s.f(x).view(5, 5)
    except RuntimeError:
        return s.f(x) * 2


# --- what reads values, draws numbers, counts, or runs again: in a graph, or honestly eager ---------------


@_model(_rows, f=_linear)
def a_refusal_that_the_model_swallows(s: Any, x: Tensor) -> Any:
    try:
        scale = float(x.sum())
    except Exception:  # noqa: BLE001
        scale = 2.0
    return s.f(x) * scale


@_model(_rows, f=_linear, whole=False)
def python_random_numbers(s: Any, x: Tensor) -> Any:
    return s.f(x) * random.random()


@_model(_rows, f=_linear, calls=lambda: 0, whole=False)
def a_counter_in_python(s: Any, x: Tensor) -> Any:
    s.calls += 1
    return s.f(x) * s.calls


@_model(_rows, f=_linear, whole=False)
def numpy_in_the_middle(s: Any, x: Tensor) -> Any:
    return s.f(x) + torch.from_numpy(x.detach().numpy() * 2)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@_model(_rows, f=_linear)
def a_straight_through_estimator_and_a_weight_that_eager_code_uses(s: Any, x: Tensor) -> Any:
    return s.f(_StraightThrough.apply(s.f(x))) + functional.linear(x, s.f.weight)


@_model(_rows, f=_linear, g=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
def a_value_branch_beside_a_shared_weight(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    z = functional.linear(y.float(), s.f.weight)
    return z if z.sum() > 0 else -s.g(z)


@_model(_rows, f=_linear, g=_linear)
def a_reentrant_checkpoint(s: Any, x: Tensor) -> Any:
    return checkpoint(s.f, s.g(x), use_reentrant=True)


@_model(_rows, blocks=lambda: nn.ModuleList(_block() for _ in range(3)))
def checkpoints_in_a_row(s: Any, x: Tensor) -> Any:
    for block in s.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


@_model(_rows, f=_linear, whole=False)
def a_hook_on_an_activation(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    y.register_hook(lambda grad: grad * 2)
    return y * 1


@_model(_rows, f=_linear, whole=False)
def a_functorch_transform(s: Any, x: Tensor) -> Any:
    return torch.func.vmap(s.f)(x)


@_model(_rows, f=_linear, g=lambda: torch.compile(nn.Linear(4, 4), backend="eager"), whole=False)
def a_child_that_is_compiled(s: Any, x: Tensor) -> Any:
    return s.g(s.f(x))


# --- containers, attributes, closures ------------------------------------------------------------------


@_model(_rows, f=_linear, g=_linear)
def a_bound_method_kept_as_an_attribute(s: Any, x: Tensor) -> Any:
    if not hasattr(s, "act"):
        return s.g.forward(s.f(x))
    return s.act(s.f(x))


@functools.lru_cache
def _table(size: int) -> Tensor:
    return torch.arange(size).float()


@_model(_rows, f=_linear, table=lambda: _table(4))
def results_of_every_kind(s: Any, x: Tensor) -> Any:
    y = s.f(x) + s.table
    return {"both": [y, y], "top": y.topk(2), "size": x.shape[0] * 2, "same": x, "weight": s.f.weight}


@_model(_rows, f=_linear)
def dtypes_read_in_python(s: Any, x: Tensor) -> Any:
    y = s.f(x)
    scores = (y @ y.t()).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(y.dtype).min)
    return scores.softmax(-1), y.to(x) + y.type_as(x), x.type(torch.float64)
