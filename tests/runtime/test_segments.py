"""A model whose Python reads values of tensors is eager autocast to the bit, on every way that it takes."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.models import autocast, equal

_WIDTH = 8
_DTYPES = (torch.bfloat16, torch.float16)


class Reads(nn.Module):
    """Runs *body*, a function of the model and its inputs."""

    ema: Tensor
    count: Tensor
    scale: float

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.bn, self.drop = nn.BatchNorm1d(_WIDTH), nn.Dropout(0.3)
        self.register_buffer("ema", torch.zeros(_WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, *args: Any) -> Any:
        """Whatever the body gives."""
        return self.body(self, *args)


def rows(count: int = 4, *, seed: int = 0, scale: float = 1.0, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, _WIDTH, generator=generator) * scale
    return x.requires_grad_(requires_grad)


_CALLS = tuple((rows(seed=seed, requires_grad=seed % 2 == 1),) for seed in (0, 1, 2, 0, 3, 1, 4))


def _own(value: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copied, value)


def outcome(model: nn.Module, call: Callable[..., Any], args: Any, scope: Any, seed: int) -> dict[str, Any]:
    """What one call does, as far as it can be told from outside."""
    torch.manual_seed(seed)
    random.seed(seed)
    found: dict[str, Any] = {"args": args, "error": None, "result": None}
    with scope:
        try:
            found["result"] = call(*args)
        except Exception as error:  # noqa: BLE001  the error is what came of it
            found["error"] = (type(error), str(error))
    leaves = [leaf for leaf in pytree.tree_leaves(found["result"]) if isinstance(leaf, Tensor)]
    losses = [leaf.float().square().sum() for leaf in leaves if leaf.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    tensors = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, Tensor)]
    found["input gradients"] = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
    found["gradients"] = {name: _copied(p.grad) for name, p in model.named_parameters()}
    found["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    found["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found["random"] = (torch.get_rng_state(), random.random())
    return found


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first place in which two values differ; ``""`` if they are the same to the bit."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} is not {type(other).__name__}"
    if isinstance(one, Tensor):
        same = equal(one.detach(), other.detach()) and one.requires_grad == other.requires_grad
        return "" if same else f"{where}: tensors differ"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{where}: keys {list(one)} are not {list(other)}"
        return next((d for key in one if (d := difference(one[key], other[key], f"{where}[{key}]"))), "")
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} items are not {len(other)}"
        pairs = zip(one, other, strict=True)
        return next((d for i, pair in enumerate(pairs) if (d := difference(*pair, f"{where}[{i}]"))), "")
    return "" if repr(one) == repr(other) else f"{where}: {one!r} is not {other!r}"


def assert_calls_like_eager(
    body: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]] = _CALLS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    training: bool = True,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
    eager: str = "",
) -> fxamp.AmpModule:
    """Compare *calls* one after the other; *eager* is part of the reason why the model is not captured."""
    torch.manual_seed(0)
    theirs = Reads(body).train(training)
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=dtype)
    for number, args in enumerate(calls):
        with mode():
            expected = outcome(theirs, theirs, _own(args), autocast(dtype), number)
            found = outcome(ours, amp, _own(args), nullcontext(), number)
        assert difference(found, expected, f"call {number}") == ""
    reasons = [piece.reason for piece in amp.report().eager]
    assert any(eager in reason for reason in reasons) if eager else reasons == []
    return amp


# --- what is read, and what comes of it -----------------------------------------------------------------


def _branch(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    return m.b(h) if h.sum() > 0 else m.b(h * 2) + m.a(h)


def _loop(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    for _ in range(int((x[0, 0].abs() * 3).item())):
        h = m.drop(m.b(h))
    return h


def _converge(m: Reads, x: Tensor) -> tuple[Tensor, int]:
    h, steps = m.a(x).tanh(), 0
    while True:
        steps += 1
        new = (m.b(h) * 0.5).tanh()
        if (new - h).abs().max().item() < 0.05 or steps > 9:
            return new, steps
        h = new


def _size(m: Reads, x: Tensor) -> tuple[Tensor, Tensor]:
    count = int((x.abs().sum() % 5).item()) + 1
    return m.a(torch.ones(count, _WIDTH)), m.b(x).narrow(0, 0, min(count, 4))


def _tolist(m: Reads, x: Tensor) -> Any:
    indices = m.a(x).argmax(1).tolist()
    return torch.stack([m.b(x[i]) * (index + 1) for i, index in enumerate(indices)]), indices


def _kept_across(m: Reads, x: Tensor) -> Any:
    kept, h = [], x
    for _ in range(3):
        h = m.a(h)
        kept.append(h)
        if h.mean().item() > 0:
            h = m.b(h)
    return torch.stack(kept).sum(0)


def _generator(m: Reads, x: Tensor) -> Any:
    def parts() -> Iterator[Tensor]:
        for row in x.split(1):
            h = m.a(row)
            yield h if h.sum() > 0 else m.b(h)

    return torch.cat(list(parts()))


def _caught(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    try:
        {True: 1}[h.sum().item() > 0]
        h = m.b(h)
    except KeyError:
        h = m.b(h * 2)
    finally:
        h = h + 1
    return h


def _divided(m: Reads, x: Tensor) -> Any:
    try:
        factor = 1 / (x[0, 0] > 0).long().item()
    except ZeroDivisionError:
        factor = 5.0
    return m.b(x) * factor


def _beams(m: Reads, x: Tensor) -> Any:
    h = m.a(x[:1])
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(2):
        values, indices = m.b(h).float().log_softmax(-1).topk(2)
        pairs = list(zip(values[0].tolist(), indices[0].tolist(), strict=True))
        longer = [([*tokens, i], score + v) for tokens, score in beams for v, i in pairs]
        beams = sorted(longer, key=lambda beam: -beam[1])[:2]
        h = h + F.one_hot(torch.tensor([beams[0][0][-1]]), _WIDTH)
    return h, beams


def _grouped(m: Reads, x: Tensor) -> Any:
    groups: dict[int, list[int]] = {}
    for row, index in enumerate(m.a(x).argmax(1).tolist()):
        groups.setdefault(index, []).append(row)
    return [m.b(x[groups[index]]) for index in sorted(groups)], groups


def _experts(m: Reads, x: Tensor) -> Any:
    weights, chosen = m.a(x).float().softmax(-1).topk(2, -1)
    out = torch.zeros_like(m.b(x))
    for index, expert in enumerate((m.a, m.b, m.bn)):
        row, column = torch.where(chosen == index)
        if row.numel() > 1:
            out.index_add_(0, row, (expert(x[row]) * weights[row, column, None]).to(out.dtype))
    return out


def _assigned(m: Reads, x: Tensor) -> Any:
    h = m.a(x).clone()
    mask = h > 0
    h[mask] = m.b(x)[mask]
    h[h < 0] = 0.0
    return m.b(h)


def _unique(m: Reads, x: Tensor) -> Any:
    found, inverse, counts = torch.unique(m.a(x).mul(2).long(), return_inverse=True, return_counts=True)
    return m.b(x) * inverse.view_as(x) * counts.max(), found


def _shape(m: Reads, x: Tensor) -> Any:
    h = x[m.a(x)[:, 0] > 0]
    if len(h) == 0:
        return m.b(x)
    return m.b(h) if h.shape[0] > 2 else m.a(h) * h.size(0)


def _predicates(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    assert not torch.isnan(h).any()
    if torch.equal(h, h.clone()) and torch.allclose(h, h * 1.0) and torch.isfinite(h).all():
        h = m.b(h)
    return h if 3 in h.argmax(1) else m.a(h)


def _layer_drop(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    for _ in range(4):
        if torch.rand([]) < 0.5:
            h = m.drop(m.b(h))
    return h


def _sorted(m: Reads, x: Tensor) -> Any:
    return torch.cat(sorted((m.a(row) for row in x.split(1)), key=lambda h: h.sum().item()))


def _no_grad(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    with torch.no_grad():
        scale = m.b(h).mean().item()
        while h.norm() > 1:
            h = h / 2
    return m.b(h) * scale + m.a(x)


def _region_off(m: Reads, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        h = m.a(x)
        if h.sum() > 0:
            h = m.b(h)
    return m.b(h) + m.a(x)


def _region_of_another_dtype(m: Reads, x: Tensor) -> Any:
    other = torch.float16 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", dtype=other):
        h = m.a(x)
        if h.sum() > 0:
            h = h * 2
    return m.b(h.float())


def _views_written(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    first = h[0]
    if h.sum() > 0:
        first.mul_(2)
    h[1].add_(first.mean().item())
    return m.b(h)


def _state(m: Reads, x: Tensor) -> Any:
    h = m.drop(m.bn(m.a(x)))
    m.count += 1
    m.ema = m.ema * 0.9 + h.detach().mean(0)
    if m.ema.sum() > 0:
        h = m.drop(m.b(h))
        m.count += 2
    return m.drop(m.bn(m.a(h))) * m.count + m.ema


def _input_written(m: Reads, x: Tensor) -> Any:
    with torch.no_grad():
        x.mul_(2)
    h = m.a(x)
    if h.sum() > 0:
        h = h + 1
    return m.b(h)


def _weight_written(m: Reads, x: Tensor) -> Any:
    with torch.no_grad():
        m.a.weight.mul_(0.5)
    if m.a(x).sum() > 0:
        with torch.no_grad():
            m.b.weight.add_(0.1)
    return m.b(x) + m.a(x)


def _text(m: Reads, x: Tensor) -> Any:
    index, value = m.a(x).argmax().item(), m.a(x).max().item()
    return m.b(x), f"{index} {value:.3f}", str(value), chr(index), {index: value}, [1, 2, 3][index % 3]


def _rebuilt(m: Reads, x: Tensor) -> Any:
    means = torch.tensor([value.item() for value in m.a(x).float().mean(1)])
    return m.b(x) * means[:, None] + torch.tensor(m.a(x).argmax(1).tolist())[:, None]


def _classes_of_numbers(m: Reads, x: Tensor) -> Any:
    index, value = m.a(x).argmax().item(), m.a(x).max().item()
    return m.b(x) if isinstance(index, int) and isinstance(value, float) else m.a(x)


def _indices(m: Reads, x: Tensor) -> Any:
    h = m.a(x)
    row, column = torch.where(h > 0)
    lengths = (x[:, 0].abs() * 2).long()
    return (
        m.b(x)[row, column].sum(),
        m.b(x)[torch.argwhere(h.sum(1) > 0)[:, 0]],
        m.b(x).masked_select(h > 0),
        h.nonzero(),
        torch.repeat_interleave(m.b(x), lengths, dim=0),
        torch.bincount(h.argmax(1)),
        torch.histc(h.float().detach(), 5),
        m.b(x) * (torch.multinomial(h.float().softmax(-1), 1)[0].item() + 1),
    )


_BODIES = [
    _branch, _loop, _converge, _size, _tolist, _kept_across, _generator, _caught, _divided, _beams, _grouped,
    _experts, _assigned, _unique, _shape, _predicates, _layer_drop, _sorted, _no_grad, _region_off,
    _views_written, _state, _input_written, _weight_written, _text, _rebuilt, _classes_of_numbers, _indices,
]  # fmt: skip


@pytest.mark.parametrize("body", _BODIES, ids=lambda body: body.__name__)
def test_a_model_that_reads_values_is_captured_and_like_eager(body: Callable[..., Any]) -> None:
    calls = _CALLS if body is not _input_written else [(rows(seed=seed),) for seed in range(5)]
    assert_calls_like_eager(body, calls)


@pytest.mark.parametrize("body", [_branch, _experts, _state, _loop, _no_grad], ids=lambda b: b.__name__)
def test_in_float16_too(body: Callable[..., Any]) -> None:
    assert_calls_like_eager(body, dtype=torch.float16)


@pytest.mark.parametrize("body", [_branch, _experts, _state], ids=lambda body: body.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_in_eval_mode(body: Callable[..., Any], mode: Any) -> None:
    assert_calls_like_eager(body, [(rows(seed=seed),) for seed in range(4)], training=False, mode=mode)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_region_of_another_dtype_around_a_read_is_like_eager(dtype: torch.dtype) -> None:
    assert_calls_like_eager(_region_of_another_dtype, dtype=dtype, eager="two low precision dtypes")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_a_selection_of_any_size_goes_on(count: int) -> None:
    def select(m: Reads, x: Tensor) -> Any:
        return m.b(x[x[:, 0] > 0])

    x = rows(40).abs()
    x[count:] *= -1
    others = [(rows(9, seed=seed),) for seed in range(2)]
    assert_calls_like_eager(select, [*others, (x,), *others, (x,)])


# --- numbers --------------------------------------------------------------------------------------------


def _scaled(m: Reads, x: Tensor) -> Any:
    scale = m.a(x).float().abs().mean().item()
    return m.b(x).float() * (scale * 0.1 * 0.3 + 0.7 + 0.1) * (scale - 0.1 - 0.2)


def test_a_number_that_is_only_computed_with_needs_no_other_graph() -> None:
    amp = assert_calls_like_eager(_scaled, [(rows(seed=seed),) for seed in range(6)])
    assert len(amp.graph_modules) == 1


def test_floats_are_computed_with_as_python_does_it() -> None:
    def computed(m: Reads, x: Tensor) -> Any:
        v = x.sum().item()
        results = [v - v, v * 0.0, v * 0.1 * 0.3, (v + 0.1) + 0.2, v * 1e300 * 1e300, -v, abs(v), v**2]
        results += [v / 3 / 7, v // 0.3, v % 0.3, 2 / (v * v + 1), 1 - v, max(v, 0.25), min(v, 1e30)]
        results += [v < v + 1, v == v, v != v, v < 0.5, bool(v), math.isnan(v)]
        return m.b(x), results

    numbers = (1.0, math.nan, 1e38, 0.0, -0.0, 0.3, math.inf, -math.inf, 1e-30)
    assert_calls_like_eager(computed, [(rows(seed=1) * number,) for number in numbers])


def test_numbers_of_both_kinds_and_sizes_are_computed_with_as_python_does_it() -> None:
    def computed(m: Reads, x: Tensor) -> Any:
        v, k, n = m.a(x).float().abs().mean().item(), (x[0, 0].abs() * 3).long().item(), x.shape[0]
        results = [
            k / 3,
            k * 0.1 * 0.3,
            n * v,
            v * n * 0.3,
            k * k,
            k // 2,
            -k,
            k**2,
            v + k,
            int(v),
            round(v, 2),
        ]
        return m.b(x).float() * (n * v * 0.1) + k * v, results

    assert_calls_like_eager(computed)


def test_numbers_that_operators_take_come_to_them() -> None:
    def taken(m: Reads, x: Tensor) -> Any:
        v = (x.abs().sum() % 1).item()
        n: Any = (x.abs().sum() * 3 % 4).long().item() + 1
        return (
            F.dropout(m.a(x), p=v), F.layer_norm(m.a(x), (_WIDTH,), eps=v), m.a(x).clamp(max=v),
            torch.add(m.a(x), m.b(x), alpha=v), x.new_tensor([v, n]), torch.full((n,), v),
            m.a(x.repeat(n, 1)), x[:n], m.b(x).topk(n).values, m.a(x).split(n),
            F.pad(m.a(x), (n, 0)), torch.arange(n),
        )  # fmt: skip

    assert_calls_like_eager(taken)


# --- what goes wrong ------------------------------------------------------------------------------------


def test_an_error_of_the_models_own_passes_on_and_the_program_survives() -> None:
    def refuses(m: Reads, x: Tensor) -> Any:
        m.count += 1
        h = m.drop(m.bn(m.a(x)))
        if x.abs().max() > 50:
            raise ValueError(f"bad input of shape {tuple(h.shape)}")
        return m.b(h)

    scales = (1.0, 100.0, 1.0, 100.0, 1.0)
    amp = assert_calls_like_eager(refuses, [(rows(seed=1, scale=scale),) for scale in scales])
    assert len(amp.graph_modules) > 0


def test_a_call_that_cannot_be_captured_to_the_end_is_undone() -> None:
    def fails(m: Reads, x: Tensor) -> Any:
        with torch.no_grad():
            m.a.weight.mul_(0.5)
            m.count += 1
            x[0].mul_(2)
        h = m.drop(m.bn(m.a(x)))
        if h.sum() > -1000:
            h = h * random.random()
        return m.drop(m.bn(m.b(h)))

    calls = [(rows(seed=seed),) for seed in range(5)]
    assert_calls_like_eager(fails, calls, eager="draws from Python's")


def test_a_way_that_cannot_be_captured_is_undone_after_others_that_could() -> None:
    def sometimes(m: Reads, x: Tensor) -> Any:
        m.count += 1
        h = m.drop(m.bn(m.a(x)))
        if x[0, 0] > 0:
            with torch.no_grad():
                x.mul_(3)
        if x.mean().item() > 0:
            h = h * random.random()
        return m.drop(m.bn(m.b(h)))

    calls = [(rows(seed=1) * sign + shift,) for sign, shift in ((-1, -3), (1, -3), (1, 3), (-1, -3), (1, 3))]
    assert_calls_like_eager(sometimes, calls, eager="draws from Python's")


def test_an_operator_that_raises_and_is_caught_makes_the_call_eager() -> None:
    def caught(m: Reads, x: Tensor) -> Any:
        h = m.a(x)
        try:
            h = h.view(int((x[0, 0] > 0).item()) + 3, -1)
        except RuntimeError:
            h = h * 2
        return m.b(h)

    calls = [(rows(seed=seed).abs() * (-1) ** seed,) for seed in range(1, 4)]
    assert_calls_like_eager(caught, calls, eager="raises RuntimeError")


def test_too_many_ways_make_the_model_eager_with_a_reason() -> None:
    def many(m: Reads, x: Tensor) -> Any:
        return m.b(m.a(x)) * (hash(x[0, 0].item()) % 7)

    calls = [(rows(seed=seed),) for seed in range(40)]
    assert_calls_like_eager(many, calls, eager="more than 32 ways")


def test_an_attribute_that_changes_between_calls_is_seen_behind_a_read() -> None:
    def scaled(m: Reads, x: Tensor) -> Any:
        h = m.a(x)
        return m.drop(m.b(h)) * m.scale if h.sum() > 0 else m.drop(h) / m.scale

    theirs = Reads(scaled)
    theirs.scale = 1.0
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=torch.bfloat16)
    for number, (scale, p) in enumerate([(1.0, 0.3), (2.0, 0.3), (2.0, 0.5), (1.0, 0.3)] * 2):
        theirs.scale = ours.scale = scale
        theirs.drop.p = ours.drop.p = p
        args = (rows(seed=number % 3),)
        expected = outcome(theirs, theirs, _own(args), autocast(torch.bfloat16), number)
        assert difference(outcome(ours, amp, _own(args), nullcontext(), number), expected) == ""
    assert amp.eager_modules == ()


# --- what the model runs in -----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_inside_a_checkpoint_of_the_users(reentrant: bool) -> None:
    theirs = Reads(_loop)
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=torch.bfloat16)
    for number in range(4):
        args = (rows(seed=number, requires_grad=True),)
        expected, found = (
            outcome(
                model,
                lambda x, model=called: checkpoint(model, x, use_reentrant=reentrant),
                _own(args),
                scope,
                number,
            )
            for model, called, scope in (
                (theirs, theirs, autocast(torch.bfloat16)),
                (ours, amp, nullcontext()),
            )
        )
        assert difference(found, expected, f"call {number}") == ""


def test_two_threads_at_once() -> None:
    model = Reads(_converge).eval()
    amp = fxamp.convert(model, device_type="cpu", dtype=torch.bfloat16)
    found: dict[int, list[Any]] = {}

    def work(seed: int) -> None:
        with torch.no_grad():
            found[seed] = [amp(rows(seed=seed + 2 * call)) for call in range(4)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad(), autocast(torch.bfloat16):
        expected = {seed: [model(rows(seed=seed + 2 * call)) for call in range(4)] for seed in (0, 1)}
    for seed, results in expected.items():
        assert difference(found[seed], results) == ""


class Nested(nn.Module):
    """A child that reads, called twice by a parent that must be eager."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.head = Reads(_loop), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like *x*."""
        h: Tensor = self.child(self.head(x)) * (1 + random.random())
        result: Tensor = self.head(self.child(h))
        return result


def test_a_child_that_reads_inside_an_eager_parent() -> None:
    theirs = Nested()
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=torch.bfloat16)
    for number in range(5):
        args = (rows(seed=number),)
        expected = outcome(theirs, theirs, _own(args), autocast(torch.bfloat16), number)
        found = outcome(ours, amp, _own(args), nullcontext(), number)
        assert difference(found, expected, f"call {number}") == ""
    assert amp.eager_modules == ("",)


# --- arguments ------------------------------------------------------------------------------------------


class Cache:
    """Keys that grow from call to call."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.total: Tensor | None = None


def _fills(m: Reads, x: Tensor, log: list[Any], table: dict[str, Any], cache: Cache) -> Any:
    h = m.a(x)
    log.append(h.detach())
    if h.sum() > 0:
        table["positive"] = m.b(h).detach()
        log.append(h.mean().item())
    cache.keys.append(h.detach())
    cache.total = h.detach() if cache.total is None else cache.total + h.detach()
    return m.b(torch.cat(cache.keys)), cache, log


def test_mutable_arguments_are_the_callers_own_and_hold_what_eager_puts_there() -> None:
    theirs = Reads(_fills)
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=torch.bfloat16)
    held: list[tuple[list[Any], dict[str, Any], Cache]] = [([], {}, Cache()), ([], {}, Cache())]
    for number in range(5):
        x = rows(seed=number)
        with torch.no_grad():
            with autocast(torch.bfloat16):
                expected = theirs(x, *held[0])
            found = amp(x, *held[1])
        assert found[1] is held[1][2]
        assert found[2] is held[1][0]
        assert difference(found[0], expected[0]) == ""
        assert difference(held[1][:2], held[0][:2]) == ""
        assert difference(vars(held[1][2]), vars(held[0][2])) == ""


def test_a_result_that_is_an_argument_is_the_argument_itself() -> None:
    def given(m: Reads, x: Tensor) -> Any:
        h = m.a(x)
        return (x, h, h) if h.sum() > 0 else (h, x, x)

    amp = fxamp.convert(Reads(given), device_type="cpu", dtype=torch.bfloat16)
    for seed in range(6):
        x = rows(seed=seed)
        one, other, third = amp(x)
        assert (one is x and other is third) or (other is x and third is x)


# --- memory ---------------------------------------------------------------------------------------------


def test_what_python_has_dropped_at_a_read_is_not_kept_alive() -> None:
    large = 1 << 12

    def drops(m: Reads, x: Tensor) -> Any:
        h = x.new_ones(4, large) * x[:, :1]
        small = h.sum(1, keepdim=True) + m.a(x)
        if h.sum() > -math.inf:  # h is held here
            small = small + h.mean()
        del h
        g = small @ torch.ones(_WIDTH, large)
        small = m.b(small) + g.mean(1, keepdim=True)
        del g
        if small.sum() > -math.inf:  # and nothing large is here
            small = m.b(small)
        return small

    counts: list[int] = []

    class AtReads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
                counts.append(len(large_tensors()) - len(others))
            return func(*args, **(kwargs or {}))

    def large_tensors() -> list[Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if type(o) is Tensor and o.numel() >= 4 * large]

    others = large_tensors()  # what other tests have left

    amp = fxamp.convert(Reads(drops).eval(), device_type="cpu", dtype=torch.bfloat16)
    with torch.no_grad(), AtReads():  # type: ignore[no-untyped-call]
        for seed in range(4):
            amp(rows(seed=seed))
    assert counts[1::2] == [0, 0, 0, 0]
    assert all(count >= 1 for count in counts[::2])
