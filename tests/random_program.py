"""Random programs: a small language, the module that runs it, and how hypothesis draws it.

A program is a list of steps over a pool of tensors, which begins with the inputs.  A step takes two tensors
of the pool and puts its result back; a block runs steps in another region or gradient mode.  Every tensor
of two or more dimensions has the batch first, so any two can be brought to the same shape, and most of
what is drawn runs; what raises must raise converted too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from torch import Tensor, nn

__all__ = ["LEFT_EAGER", "Block", "Model", "Program", "Step", "programs"]

_WIDTH = 8
_F32, _F64, _F16, _BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Step:
    """Apply *op* to the tensors *a* and *b* of the pool, counted from its end, modulo its length."""

    op: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class Block:
    """Run *steps* inside a context manager of the kind *kind*."""

    kind: str
    steps: tuple[Step | Block, ...]


Steps: TypeAlias = "tuple[Step | Block, ...]"


@dataclass(frozen=True)
class Program:
    """What one module does.

    Attributes:
        steps: Its body.
        returned: Which tensors of the pool it returns.
        input_dtype: The dtype of its second input.
        weight_dtype: The dtype of its second weight.
    """

    steps: Steps
    returned: tuple[int, ...] = (0,)
    input_dtype: torch.dtype = _F32
    weight_dtype: torch.dtype = _F32

    def ops(self) -> set[str]:
        """The names of all steps and blocks."""
        return _names(self.steps)


def _names(steps: Steps) -> set[str]:
    found: set[str] = set()
    for step in steps:
        found |= {step.op} if isinstance(step, Step) else {step.kind} | _names(step.steps)
    return found


class Model(nn.Module):
    """A module whose ``forward`` runs a program.

    Its weights are such as matter to autocast: shared by several steps, tied under two names, frozen, of
    another dtype; its buffers are updated in place and rebound.
    """

    running: Tensor
    state: Tensor
    count: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.tied = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.second = nn.Parameter(torch.randn(_WIDTH, _WIDTH).to(program.weight_dtype))
        self.frozen = nn.Parameter(torch.randn(_WIDTH, _WIDTH), requires_grad=False)
        self.embedding = nn.Embedding(_WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.filters = nn.Parameter(torch.randn(4, 2, 3))
        self.layer_norm, self.batch_norm = nn.LayerNorm(_WIDTH), nn.BatchNorm1d(_WIDTH)
        self.group_norm, self.prelu = nn.GroupNorm(2, _WIDTH), nn.PReLU()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.register_buffer("running", torch.zeros(_WIDTH))
        self.register_buffer("state", torch.ones(_WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor, other: Tensor, mask: Tensor, index: Tensor) -> Any:
        """Run the program on *x*, *other* and *mask* (bool), all ``[rows, 8]``, and *index* (``[rows]``)."""
        pool = [index, mask, other, x]
        self._run(self.program.steps, pool, x.shape[0])
        results = [_pick(pool, position) for position in self.program.returned]
        return results[0] if len(results) == 1 else {"first": results[0], "rest": tuple(results[1:])}

    def _run(self, steps: Steps, pool: list[Tensor], rows: int) -> None:
        for step in steps:
            if isinstance(step, Block):
                with CONTEXTS[step.kind]():
                    self._run(step.steps, pool, rows)
                continue
            a, b = _pick(pool, step.a), _pick(pool, step.b)
            if step.op in ON_ANYTHING:
                pool.append(ON_ANYTHING[step.op](self, a))
            else:
                pool.append(ON_ROWS[step.op](self, _rows(a, rows), _rows(b, rows)))


def _pick(pool: list[Tensor], position: int) -> Tensor:
    return pool[-1 - position % len(pool)]


def _rows(x: Tensor, rows: int) -> Tensor:
    """*x* as floating ``[rows, 8]``."""
    if x.is_complex():
        x = x.abs()
    if not x.is_floating_point():
        x = x.float()
    if x.dim() == 0:
        x = x.expand(rows, _WIDTH)
    if x.dim() == 1:
        x = x.expand(rows, _WIDTH) if x.shape[0] == _WIDTH else x.unsqueeze(1)
    x = x.flatten(1) if x.dim() > 2 else x
    width = x.shape[1]
    return F.pad(x, (0, _WIDTH - width)) if width < _WIDTH else x[:, :_WIDTH]


def _single(x: Tensor) -> Tensor:
    """*x*, which no float64 weight meets, in at most single precision."""
    return x.float() if x.dtype is _F64 else x


def _own(x: Tensor) -> Tensor:
    """*x* if it may be written to, else a copy."""
    return x.clone() if x._is_view() or (x.is_leaf and x.requires_grad) else x


def _square(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 2, 4)


def _classes(x: Tensor) -> Tensor:
    return x.detach().float().nan_to_num().argmax(1)


def _update_running(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.running.mul_(0.9).add_(x.float().mean(0), alpha=0.1)
        model.count += 1
    return x * model.running


def _rebind_state(model: Model, x: Tensor) -> Tensor:
    model.state = model.state * 0.5 + x.detach().sum(0)
    return model.state + 1


def _update_weight(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    return model.first(_single(x))  # type: ignore[no-any-return]


def _scale_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(2)


def _by_dtype(x: Tensor) -> Tensor:
    if x.dtype in (_F16, _BF16):
        return x.clamp(max=torch.finfo(x.dtype).max / 2)
    return x + torch.finfo(x.dtype).eps


def _assign_column(x: Tensor, y: Tensor) -> Tensor:
    written = x.clone()
    written[:, 2] = y[:, 0].to(x.dtype)
    written[:, 4:] *= 2
    return written


def _attention(a: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(_square(a), _square(b), _square(b), attn_mask=mask).flatten(1)


def _batched(model: Model, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(b, a, model.second[:4, :4].expand(a.shape[0], 4, 4)).flatten(1)


def _enlarge(x: Tensor) -> Tensor:
    return F.interpolate(x.unsqueeze(1), scale_factor=2.0, mode="bilinear").flatten(1)


def _multi_head(model: Model, query: Tensor, key: Tensor) -> Tensor:
    attended: Tensor = model.attention(query, key, key)[0]
    return attended.flatten(1)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


# fmt: off
ON_ROWS: Mapping[str, Callable[[Model, Tensor, Tensor], Tensor]] = MappingProxyType({
    # matrix products, with weights that other steps use too
    "linear": lambda m, a, b: m.first(_single(a)),
    "tied": lambda m, a, b: m.tied(_single(a)),
    "weight_transposed": lambda m, a, b: _single(a) @ m.first.weight.t(),
    "second": lambda m, a, b: _single(a) @ m.second,
    "frozen": lambda m, a, b: torch.mm(_single(a), m.frozen),
    "weights_alone": lambda m, a, b: _single(a) @ (m.second @ m.first.weight),
    "functional_linear": lambda m, a, b: F.linear(_single(a), m.embedding.weight, m.first.bias),
    "weight_as_it_is": lambda m, a, b: a * m.first.weight[0] + m.first.bias,
    "outer": lambda m, a, b: torch.bmm(_single(a).unsqueeze(2), _single(b).unsqueeze(1)).mean(1),
    "addmm": lambda m, a, b: torch.addmm(_single(b), _single(a), m.second),
    "baddbmm": lambda m, a, b: _batched(m, _square(a), _square(b)),
    "matmul_nd": lambda m, a, b: torch.matmul(_square(a), _square(b).transpose(1, 2)).flatten(1),
    "matmul_own": lambda m, a, b: torch.matmul(a, a.t()).sum(1, keepdim=True),
    "conv": lambda m, a, b: F.conv1d(_square(_single(a)), m.filters, padding=1).flatten(1),
    "conv_same": lambda m, a, b: F.conv1d(_square(_single(a)), m.filters, padding="same").flatten(1),
    "attention": lambda m, a, b: _attention(a, b, None),
    "attention_masked": lambda m, a, b: _attention(a, b, torch.zeros(2, 2)),
    "multi_head": lambda m, a, b: _multi_head(m, _square(_single(a)), _square(_single(b))),
    "recurrent": lambda m, a, b: m.recurrent(_square(_single(a)))[0].flatten(1),

    # composites that hide operators with a rule
    "einsum": lambda m, a, b: torch.einsum("bi,ij->bj", _single(a), m.second),
    "einsum_batch": lambda m, a, b: torch.einsum("bi,bj->bij", a, b).diagonal(dim1=1, dim2=2),
    "tensordot": lambda m, a, b: torch.tensordot(a.float(), m.first.weight, dims=([1], [0])),
    "cross_entropy": lambda m, a, b: F.cross_entropy(a, _classes(b), label_smoothing=0.1),
    "cross_entropy_each": lambda m, a, b: F.cross_entropy(a, _classes(b), reduction="none").unsqueeze(1),
    "cosine": lambda m, a, b: F.cosine_similarity(a, b, dim=1).unsqueeze(1),
    "cdist": lambda m, a, b: torch.cdist(_single(a).float(), _single(b).float()).mean(1, keepdim=True),
    "inner": lambda m, a, b: torch.inner(a.float(), m.frozen),
    "bilinear": lambda m, a, b: F.bilinear(a.float(), b.float(), m.embedding.weight[None], m.scale[None]),
    "roll": lambda m, a, b: torch.roll(a, 1, 1),
    "gumbel": lambda m, a, b: F.gumbel_softmax(a, dim=1),
    "mse": lambda m, a, b: F.mse_loss(a, b.detach()),
    "l1": lambda m, a, b: F.l1_loss(a, b, reduction="none"),
    "smooth_l1": lambda m, a, b: F.smooth_l1_loss(a, b),
    "bce_logits": lambda m, a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid().detach().to(a.dtype)),
    "normalize": lambda m, a, b: F.normalize(a, dim=1),
    "interpolate": lambda m, a, b: F.interpolate(a.unsqueeze(1), size=16, mode="linear").squeeze(1),
    "interpolate_2d": lambda m, a, b: _enlarge(_square(a)),
    "pad_reflect": lambda m, a, b: F.pad(_square(a), (1, 1), mode="reflect").flatten(1),
    "embedding": lambda m, a, b: m.embedding(_classes(a)),
    "pairwise": lambda m, a, b: F.pairwise_distance(a, b).unsqueeze(1),

    # inputs that must agree
    "cat": lambda m, a, b: torch.cat([a[:, :4], b[:, 4:]], dim=1),
    "cat_mixed": lambda m, a, b: torch.cat([m.first(_single(a)), a, b], dim=1)[:, 4:12],
    "stack": lambda m, a, b: torch.stack([a, b, a], dim=1).sum(1),
    "hstack": lambda m, a, b: torch.hstack([b, a]),
    "where": lambda m, a, b: torch.where(a > b, a, b),
    "index_copy": lambda m, a, b: _single(a).index_copy(1, torch.tensor([0, 3]), _single(b)[:, :2]),
    "index_add": lambda m, a, b: a.index_add(1, torch.tensor([1, 2]), b[:, :2].to(a.dtype)),
    "index_put": lambda m, a, b: a.index_put((torch.arange(a.shape[0]), _classes(b)), b[:, 0].to(a.dtype)),
    "scatter": lambda m, a, b: a.scatter_add(1, _classes(b).unsqueeze(1), b[:, :1].to(a.dtype)),
    "addcmul": lambda m, a, b: torch.addcmul(a, b, b, value=0.5),
    "lerp": lambda m, a, b: torch.lerp(a, b.to(a.dtype), 0.3),
    "add": lambda m, a, b: a + b,
    "mul": lambda m, a, b: a * b,
    "div": lambda m, a, b: a / (b.abs() + 1),
    "maximum": lambda m, a, b: torch.maximum(a, b),
    "type_as": lambda m, a, b: a.type_as(b) + b,

    # modules and element-wise operators
    "layer_norm": lambda m, a, b: m.layer_norm(_single(a)),
    "batch_norm": lambda m, a, b: m.batch_norm(_single(a)),
    "group_norm": lambda m, a, b: m.group_norm(_single(a)),
    "prelu": lambda m, a, b: m.prelu(_single(a)),
    "softmax": lambda m, a, b: a.softmax(1),
    "log_softmax": lambda m, a, b: F.log_softmax(a, 1),
    "softmax_as": lambda m, a, b: F.softmax(a, 1, dtype=b.dtype),
    "gelu": lambda m, a, b: F.gelu(a),
    "silu": lambda m, a, b: F.silu(a),
    "sigmoid": lambda m, a, b: a.sigmoid(),
    "exp": lambda m, a, b: a.clamp(max=4).exp(),
    "log1p": lambda m, a, b: a.abs().log1p(),
    "pow": lambda m, a, b: a.pow(2) + 2.0 ** b.clamp(-3, 3),
    "rsqrt": lambda m, a, b: (a.square() + 1).rsqrt(),
    "cumsum": lambda m, a, b: a.cumsum(1),
    "dropout": lambda m, a, b: F.dropout(a, 0.4, m.training),
    "rand": lambda m, a, b: a + torch.rand_like(a),
    "erfinv": lambda m, a, b: torch.erfinv(a.tanh() * 0.5),

    # reductions, some to a tensor without dimensions
    "sum": lambda m, a, b: a.sum(),
    "mean_rows": lambda m, a, b: a.mean(0),
    "norm": lambda m, a, b: a.norm(dim=1, keepdim=True),
    "amax": lambda m, a, b: a.amax(1, keepdim=True),
    "max": lambda m, a, b: a.max(1, keepdim=True).values,
    "topk": lambda m, a, b: a.topk(2, dim=1).values,
    "sort": lambda m, a, b: a.sort(1).values,
    "var": lambda m, a, b: a.var(1, unbiased=False, keepdim=True),
    "logsumexp": lambda m, a, b: a.logsumexp(1, keepdim=True),
    "scaled": lambda m, a, b: a * m.scale,
    "scaled_by_mean": lambda m, a, b: a * b.mean(),

    # in place
    "add_": lambda m, a, b: _own(a).add_(b.to(a.dtype)),
    "mul_": lambda m, a, b: _own(a).mul_(0.5),
    "relu_": lambda m, a, b: _own(a).relu_(),
    "masked_fill_": lambda m, a, b: _own(a).masked_fill_(b > 0, -1.0),
    "assign": lambda m, a, b: _assign_column(a, b),
    "addmm_": lambda m, a, b: _own(_single(a)).addmm_(_single(a), m.second.to(_single(a).dtype)),
    "copy_": lambda m, a, b: _own(a).copy_(b),

    # the model's state
    "update_running": lambda m, a, b: _update_running(m, a),
    "rebind_state": lambda m, a, b: _rebind_state(m, a),
    "update_weight": lambda m, a, b: _update_weight(m, a),

    # Python that looks at dtypes and sizes
    "by_dtype": lambda m, a, b: _by_dtype(a),
    "min_fill": lambda m, a, b: a.masked_fill(b > 0, torch.finfo(a.dtype).min).amax(1, keepdim=True),
    "new_zeros": lambda m, a, b: torch.cat([a.new_zeros(a.shape[0], 2), b[:, 2:].to(a.dtype)], dim=1),
    "scale_by_size": lambda m, a, b: a / math.sqrt(a.shape[1]) * (a.shape[0] * 2 // 3),
    "positions": lambda m, a, b: a + torch.arange(a.shape[0], dtype=b.dtype).unsqueeze(1),
    "ones_like_size": lambda m, a, b: torch.ones(b.size(0), _WIDTH) * a,
    "merge_rows": lambda m, a, b: a.reshape(a.shape[0] * 2, 4).softmax(1).view(a.shape[0], _WIDTH),
    "first_half": lambda m, a, b: torch.cat([a[: a.shape[0] // 2], b[b.shape[0] // 2 :]]),

    # left eager
    "custom_function": lambda m, a, b: _Double.apply(a),
    "branch_on_value": lambda m, a, b: a if bool((b.float().sum() > 0).item()) else a * 2,
    "new_leaf": lambda m, a, b: torch.mm(a.detach().float().requires_grad_(), m.first.weight),
})

ON_ANYTHING: Mapping[str, Callable[[Model, Tensor], Tensor]] = MappingProxyType({
    "to_f32": lambda m, x: x.float(),
    "to_f64": lambda m, x: x.double(),
    "to_f16": lambda m, x: x.to(_F16),
    "to_bf16": lambda m, x: x.bfloat16(),
    "to_int": lambda m, x: x.nan_to_num().clamp(-9, 9).long() if not x.is_complex() else x,
    "to_bool": lambda m, x: x != 0,
    "to_complex": lambda m, x: x.float().to(torch.complex64) * 1j,
    "half_view": lambda m, x: x.transpose(0, -1).transpose(0, -1) if x.dim() else x,
    "to_same": lambda m, x: x.to(x.dtype),
    "at_least_2d": lambda m, x: torch.atleast_2d([x, x])[0] if x.dim() > 1 else x,
    "scale_in_place": lambda m, x: _scale_in_place(x),
    "clone": lambda m, x: x.clone(),
    "detach": lambda m, x: x.detach(),
    "contiguous": lambda m, x: x.contiguous(),
    "unsqueeze": lambda m, x: x.unsqueeze(-1) if x.dim() > 1 else x,
    "chunk": lambda m, x: x.chunk(2, -1)[-1] if x.dim() > 1 else x,
    "transposed": lambda m, x: x.unflatten(-1, (-1, 2)).mT if x.dim() > 1 and x.shape[-1] == _WIDTH else x,
    "slice": lambda m, x: x[..., 1::2] if x.dim() > 1 else x,
    "neg": lambda m, x: -x if x.dtype is not torch.bool else ~x,
    "times_two": lambda m, x: x * 2,
    "times_number_tensor": lambda m, x: x * torch.tensor(0.5),
})

CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType({
    "off": lambda: torch.autocast("cpu", enabled=False),
    "bfloat16": lambda: torch.autocast("cpu", dtype=_BF16),
    "float16": lambda: torch.autocast("cpu", dtype=_F16),
    "no_cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
})
# fmt: on

LEFT_EAGER = frozenset({"custom_function", "branch_on_value", "new_leaf"})
"""Steps that a graph cannot replay: the module that has one is run by its own Python."""

_RARE = sorted({*LEFT_EAGER, "to_complex"})
_COMMON = sorted({*ON_ROWS, *ON_ANYTHING}.difference(_RARE))
_DTYPES = (_F32, _F32, _BF16, _F16, _F64, torch.int64)


def _step() -> st.SearchStrategy[Step]:
    ops = st.sampled_from(_COMMON * 5 + _RARE)
    near = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4, 6, 9))
    return st.builds(Step, ops, near, near)


def _body() -> st.SearchStrategy[Steps]:
    step: st.SearchStrategy[Step | Block] = _step()
    for most in (3, 4):
        block = st.builds(Block, st.sampled_from(sorted(CONTEXTS)), _tuples(step, most))
        step = st.one_of(_step(), _step(), _step(), _step(), _step(), block)
    return _tuples(step, 14)


def _tuples(step: st.SearchStrategy[Step | Block], most: int) -> st.SearchStrategy[Steps]:
    return st.lists(step, min_size=1, max_size=most).map(tuple)


def programs() -> st.SearchStrategy[Program]:
    """Programs of up to some thirty steps."""
    returned = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)
    weights = st.sampled_from((_F32, _F32, _F32, _BF16, _F16))
    return st.builds(Program, _body(), returned, st.sampled_from(_DTYPES), weights)
