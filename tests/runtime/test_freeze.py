"""``freeze``: the bits of eager autocast without a weight cast, and each weight stored as it is used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.errors import ArgumentError, FrozenError
from fxamp.runtime.frozen_module import FrozenModule
from tests.live_bytes import LiveBytes
from tests.models import SmallCNN, SmallTransformer, autocast, equal

BF16 = torch.bfloat16
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Casts(TorchDispatchMode):
    """The sizes of what is cast between floating dtypes inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith(("aten::_to_copy", "aten::to.")) and result.dtype is not args[0].dtype:
            self.shapes.append(tuple(result.shape))
        return result


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def _convert(model: nn.Module, dtype: torch.dtype = BF16) -> Any:
    return fxamp.convert(model, dtype=dtype)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _assert_like_eager(
    model: nn.Module, frozen: Any, *args: Any, dtype: torch.dtype = BF16, **kwargs: Any
) -> None:
    for mode in MODES.values():
        with mode():
            with autocast(dtype):
                expected = _tensors(model(*args, **kwargs))
            for _ in range(2):
                found = _tensors(frozen(*args, **kwargs))
                assert len(found) == len(expected)
                assert all(equal(one, other) for one, other in zip(found, expected, strict=True))


@contextmanager
def _grad_mode(mode: str) -> Iterator[None]:
    with MODES[mode]():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_frozen_mlp_gives_the_bits_of_eager_autocast_at_other_sizes_too(dtype: torch.dtype) -> None:
    model = _mlp()
    frozen = fxamp.freeze(_convert(model, dtype), (torch.randn(4, 16),))
    for rows in (4, 1, 7):
        _assert_like_eager(model, frozen, torch.randn(rows, 16), dtype=dtype)
    _assert_like_eager(model, frozen, torch.randn(2, 3, 16), dtype=dtype)  # another signature: captured anew


def test_convolutions_and_norms_in_evaluation_give_the_bits_of_eager_autocast() -> None:
    model = SmallCNN()
    model(torch.randn(8, 3, 8, 8))  # statistics that are not the first ones
    model.eval()
    frozen = fxamp.freeze(_convert(model), (torch.randn(2, 3, 8, 8),))
    _assert_like_eager(model, frozen, torch.randn(5, 3, 8, 8))
    dtypes = {name: value.dtype for name, value in frozen.state_dict().items()}
    assert dtypes["stem.0.weight"] is dtypes["head.bias"] is BF16
    assert dtypes["stem.1.weight"] is dtypes["stem.1.running_mean"] is torch.float32


@pytest.mark.parametrize("mode", list(MODES))
def test_a_frozen_call_casts_its_activations_only(mode: str) -> None:
    model = _mlp()
    frozen = fxamp.freeze(_convert(model), (torch.randn(4, 16),))
    x = torch.randn(4, 16)
    with _grad_mode(mode):
        frozen(x)
        with Casts() as ours:
            frozen(x)
        with Casts() as eagers, autocast(BF16):
            model(x)
    assert ours.shapes == [(4, 16)]
    assert len(eagers.shapes) == 5


class _Tied(nn.Module):
    """An embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens) * 0.5)
        return logits


def test_a_tied_weight_is_kept_in_both_precisions_and_cast_in_no_call() -> None:
    model = _Tied().eval()
    frozen = fxamp.freeze(_convert(model), (torch.randint(0, 30, (2, 5)),))
    _assert_like_eager(model, frozen, torch.randint(0, 30, (3, 7)))
    state = frozen.state_dict()
    assert state["embed.weight"].dtype is state["head.weight"].dtype is torch.float32
    assert f"weights: {30 * 16 * (4 + 2):,} bytes" in repr(frozen)
    tokens = torch.randint(0, 30, (3, 7))
    with torch.no_grad(), Casts() as casts:
        frozen(tokens)
    assert casts.shapes == [(3, 7, 16)]


def test_a_kernel_that_casts_by_itself_keeps_its_float32_weights() -> None:
    model = SmallTransformer().eval()
    frozen = fxamp.freeze(_convert(model), (torch.randint(0, 30, (2, 5)),))
    _assert_like_eager(model, frozen, torch.randint(0, 30, (3, 7)))
    assert frozen.state_dict()["blocks.0.linear1.weight"].dtype is torch.float32


class _Shared(nn.Module):
    """One weight under two names, rounded by both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x))
        return result


def test_a_weight_under_two_names_is_stored_once() -> None:
    model = _Shared().eval()
    frozen = fxamp.freeze(_convert(model), (torch.ones(2, 8),))
    state = frozen.state_dict()
    assert state["one.weight"].data_ptr() == state["two.weight"].data_ptr()
    assert sum(weight.nbytes for weight in frozen.parameters()) == 2 * (64 + 8)
    _assert_like_eager(model, frozen, torch.randn(2, 8))


class _Strided(nn.Module):
    """Weights whose memory is in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.filters = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.conv2d(x, self.filters).mean(3).transpose(1, 2), self.turned.t())


def test_strides_are_kept() -> None:
    model = _Strided().eval()
    frozen = fxamp.freeze(_convert(model), (torch.randn(2, 3, 8, 8),))
    for name, weight in frozen.named_parameters():
        assert weight.stride() == model.get_parameter(name).stride()
        assert weight.dtype is BF16
    _assert_like_eager(model, frozen, torch.randn(2, 3, 8, 8))


# --- without and with consuming ---------------------------------------------------------------------


def test_the_model_is_as_it_was_and_shares_nothing_with_the_frozen_one() -> None:
    model = SmallCNN().train()
    before = copy.deepcopy(model.state_dict())
    amp = _convert(model)
    frozen = fxamp.freeze(amp, (torch.randn(2, 3, 8, 8),))
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True] * len(
        list(model.parameters())
    )
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = frozen(x)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
        assert torch.equal(frozen(x), expected)
    amp(x)  # trains on


def test_a_consumed_model_and_its_converted_one_say_where_the_weights_are() -> None:
    model = _mlp()
    reference = copy.deepcopy(model)
    amp = _convert(model)
    frozen = fxamp.freeze(amp, (torch.randn(4, 16),), consume=True)
    _assert_like_eager(reference, frozen, torch.randn(3, 16))
    for call in (lambda: amp(torch.ones(1, 16)), lambda: model(torch.ones(1, 16)), amp.report):
        with pytest.raises(FrozenError, match=r"moved to the frozen module.*\n  call that"):
            call()
    with pytest.raises(FrozenError, match="moved"):
        fxamp.freeze(amp, (torch.randn(4, 16),))
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def _gpt(width: int = 64, layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layer = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(nn.Embedding(50, width), *(copy.deepcopy(each) for each in layer * layers)).eval()


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + torch.as_tensor(self.down(functional.gelu(self.up(self.norm_2(x)))))


class _GPT(nn.Module):
    """A decoder with an untied head."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return logits


def _peak(model: nn.Module, *scopes: Any) -> int:
    """Bytes of the weights, and the most that a call on one token adds."""
    live = LiveBytes()
    for parameter in model.parameters():
        live._note(parameter, new=True)
    with ExitStack() as stack:
        for scope in (torch.no_grad(), *scopes, live):
            stack.enter_context(scope)
        model(torch.zeros(1, 1, dtype=torch.long))
    return live.peak


def test_a_frozen_decoder_needs_little_more_than_a_third_of_the_memory_of_eager_autocast() -> None:
    torch.manual_seed(0)
    model = _GPT(64, 12, 10 * 64).eval()  # the proportions of a GPT 768 wide with 8,000 words
    frozen = fxamp.freeze(_convert(model), (torch.zeros(1, 1, dtype=torch.long),))
    _assert_like_eager(model, frozen, torch.randint(0, 640, (1, 1)))
    assert _peak(frozen) <= 0.38 * _peak(model, autocast(BF16))


def test_a_frozen_decoder_casts_what_each_norm_gives_and_nothing_else() -> None:
    model = _GPT(64, 12, 100).eval()
    tokens = torch.randint(0, 100, (2, 7))
    frozen = fxamp.freeze(_convert(model), (tokens,))
    with torch.no_grad():
        frozen(tokens)
        with Casts() as casts:
            frozen(tokens)
    assert casts.shapes == [(2, 7, 64)] * 25


def test_consuming_never_holds_two_copies_of_all_weights() -> None:
    model = _gpt()
    amp = _convert(model)
    whole = _bytes(model)
    live = LiveBytes()
    for parameter in model.parameters():
        live._note(parameter, new=True)
    assert live.now == whole
    with live:
        frozen = fxamp.freeze(amp, (torch.zeros(1, 1, dtype=torch.long),), consume=True)
    assert live.peak <= 1.1 * whole
    assert live.now == _bytes(frozen) < 0.53 * whole


# --- what a call is known from ----------------------------------------------------------------------


def test_without_an_example_the_calls_so_far_are_the_examples() -> None:
    model = _mlp()
    amp = _convert(model)
    with torch.no_grad():
        amp(torch.randn(4, 16))
    frozen = fxamp.freeze(amp)
    assert {value.dtype for value in frozen.state_dict().values()} == {BF16}
    _assert_like_eager(model, frozen, torch.randn(4, 16))


def test_a_model_that_was_called_in_training_only_needs_an_example() -> None:
    amp = _convert(_mlp().train())
    amp(torch.randn(4, 16))
    with pytest.raises(ArgumentError, match=r"has not been called for inference\n  give an example"):
        fxamp.freeze(amp)


def test_keyword_arguments_are_part_of_the_example() -> None:
    model = SmallTransformer().eval()
    tokens = torch.randint(0, 30, (2, 5))
    frozen = fxamp.freeze(_convert(model), (tokens,), {"scale": 0.5})
    _assert_like_eager(model, frozen, tokens, scale=0.5)
    _assert_like_eager(model, frozen, tokens)


class _Switch(nn.Module):
    """Uses its weight as it is, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        y: Tensor = self.f(x)
        return y + self.f.weight.sum() if whole else y


def test_a_call_that_needs_a_float32_weight_that_is_gone_raises_with_its_place() -> None:
    model = _Switch().eval()
    frozen = fxamp.freeze(_convert(model), (torch.ones(2, 4),))
    with torch.no_grad(), pytest.raises(FrozenError, match=r"'f.weight'.*\n.*test_freeze.py.*\n.*example"):
        frozen(torch.ones(2, 4), True)
    _assert_like_eager(model, frozen, torch.ones(2, 4))
    both = fxamp.freeze(_convert(model), (torch.ones(2, 4), True))
    _assert_like_eager(model, both, torch.ones(2, 4), True)
    _assert_like_eager(model, both, torch.ones(2, 4))


def test_what_cannot_be_frozen_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"takes what fxamp.convert gives, not Linear"):
        fxamp.freeze(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="converted function"):
        fxamp.freeze(fxamp.convert(torch.relu, device_type="cpu", dtype=BF16), (torch.ones(1),))
    with pytest.raises(ArgumentError, match="parameters without a shape"):
        fxamp.freeze(_convert(nn.LazyLinear(2)), (torch.ones(1, 2),))
    model = _mlp()
    model.rows = (row for row in range(3))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"cannot be copied: TypeError.*\n  copy.deepcopy"):
        fxamp.freeze(_convert(model), (torch.ones(1, 16),))


# --- models that are more than one graph ------------------------------------------------------------


class _Reads(nn.Module):
    """Takes a way by a value, and counts in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.a(x)
        if y.sum() > 0:
            y = self.b(y)
        z: Tensor = self.c(y)
        return z


def test_a_model_that_reads_values_goes_its_ways_frozen_too() -> None:
    model = _Reads().eval()
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    frozen = fxamp.freeze(_convert(model), (inputs[0],))
    assert frozen.state_dict()["calls"] == 0, "the example left its trace"
    for x in inputs:
        with torch.no_grad():
            with autocast(BF16):
                expected = model(x)
            assert torch.equal(frozen(x), expected)
    assert frozen.state_dict()["calls"] == model.calls == len(inputs)
    dtypes = {name: value.dtype for name, value in frozen.state_dict().items()}
    assert dtypes["a.weight"] is dtypes["c.weight"] is BF16
    assert frozen.eager_modules == ()


class _Counts(nn.Module):
    """Counts its calls in Python, which no graph can, and uses a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8))
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = functional.linear(self.body(x), self.own)
        return result


@pytest.mark.parametrize("consume", [False, True])
def test_an_eager_piece_keeps_its_weights_and_its_children_are_frozen(*, consume: bool) -> None:
    model = _Counts().eval()
    reference = copy.deepcopy(model)
    frozen = fxamp.freeze(_convert(model), (torch.randn(2, 8),), consume=consume)
    _assert_like_eager(reference, frozen, torch.randn(3, 8))
    assert frozen.eager_modules == ("",)
    dtypes = {name: value.dtype for name, value in frozen.state_dict().items()}
    assert dtypes["own"] is torch.float32
    assert dtypes["body.0.weight"] is dtypes["body.2.bias"] is BF16
    with torch.no_grad(), Casts() as casts:
        frozen(torch.randn(3, 8))
    assert casts.shapes == [(3, 8), (8, 8)]  # the input, and the weight that eager code uses


class _TiedBesideEagerCode(nn.Module):
    """Counts its calls in Python; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.embed(tokens))
        return logits


class _Scales(nn.Module):
    """Reads a value, and uses the weight of its child, which is that of *other*, in float32, too."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.f.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f(x)
        return y * self.f.weight.sum() if y.isfinite().all() else y


class _TiedToAReader(nn.Module):
    """Counts its calls in Python; two children share a weight, and one of them reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.scales = _Scales(self.f)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.scales(self.f(x))
        return result


class _CountsInTraining(_Counts):
    """Its Python runs eagerly in training only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        result: Tensor = functional.linear(self.body(x), self.own)
        return result


def _frozen(amp: Any, x: Tensor, *, called: bool) -> Any:
    """*amp* frozen after calls, or with an example."""
    if not called:
        return fxamp.freeze(amp, (x,))
    with torch.no_grad():
        for _ in range(2):  # the first is a survey
            amp(x)
    return fxamp.freeze(amp)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("model", "x", "given"),
    [
        (_TiedBesideEagerCode(), torch.tensor([[1, 2], [3, 0]]), (2, 2, 8)),
        (_TiedToAReader(), torch.randn(4, 8), (4, 8)),
    ],
    ids=["tied", "reads"],
)
def test_a_weight_that_captured_children_of_an_eager_piece_share_is_not_cast(
    model: nn.Module, x: Tensor, given: tuple[int, ...], *, called: bool
) -> None:
    amp = _convert(model.eval())
    frozen = _frozen(amp, x, called=called)
    assert not called or any("uses its weights too" in piece.reason for piece in amp.report().eager)
    _assert_like_eager(model, frozen, x)
    assert frozen.eager_modules == ("",)
    with torch.no_grad(), Casts() as casts:
        frozen(x)
    assert casts.shapes == [given]  # what the first linear layer is given


@pytest.mark.parametrize("called", [False, True])
def test_what_runs_eagerly_in_training_only_is_frozen(*, called: bool) -> None:
    model, x = _CountsInTraining(), torch.randn(3, 8)
    amp = _convert(model)
    amp(x).sum().backward()
    assert amp.eager_modules == ("",)
    model.eval()
    frozen = _frozen(amp, x, called=called)
    _assert_like_eager(model, frozen, x)
    with torch.no_grad(), Casts() as casts:
        frozen(x)
    assert casts.shapes == [(3, 8)]
    assert {value.dtype for value in frozen.state_dict().values()} == {BF16}


def test_a_buffer_that_forward_replaces_is_read_anew() -> None:
    class Remembers(nn.Module):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.f(x) + self.last
            self.last = x * 2
            return y

    model = Remembers().eval()
    frozen = fxamp.freeze(_convert(model), (torch.ones(2, 4),))
    for seed in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            with autocast(BF16):
                expected = model(x)
            assert torch.equal(frozen(x), expected)
    assert torch.equal(frozen.state_dict()["last"], model.last)


def test_the_weights_of_weight_norm_are_computed_as_before() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)).eval()
    frozen = fxamp.freeze(_convert(model), (torch.ones(2, 4),))
    _assert_like_eager(model, frozen, torch.randn(2, 4))
    assert frozen.state_dict()["1.weight"].dtype is BF16


def test_freezing_in_inference_mode_gives_a_module_for_every_mode() -> None:
    model = _mlp()
    with torch.inference_mode():
        frozen = fxamp.freeze(_convert(model), (torch.randn(4, 16),))
    assert isinstance(frozen, FrozenModule)
    _assert_like_eager(model, frozen, torch.randn(4, 16))


class _FirstCall(nn.Module):
    """Sets an attribute in its first call, so that only the second one is captured."""

    seen: Tensor
    scale: int

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = 3
        self.seen += 1
        y: Tensor = self.f(x) * self.scale
        return y


def test_what_a_first_call_sets_is_set_and_the_buffers_are_as_before() -> None:
    model = _FirstCall().eval()
    frozen = fxamp.freeze(_convert(copy.deepcopy(model)), (torch.ones(2, 4),))
    assert frozen.state_dict()["seen"] == 0
    assert frozen.state_dict()["f.weight"].dtype is BF16
    _assert_like_eager(model, frozen, torch.randn(2, 4))
    assert frozen.eager_modules == ()


def test_the_example_is_not_written_to() -> None:
    class Writes(_Counts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x = torch.ones(2, 8)
    fxamp.freeze(_convert(Writes().eval()), (x,))
    assert torch.equal(x, torch.ones(2, 8))


def test_a_model_that_cannot_be_copied_is_not_consumed() -> None:
    model = _mlp()
    amp = _convert(model)
    with torch.no_grad():
        expected = amp(torch.ones(1, 16))
    model.rows = (row for row in range(3))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="cannot be copied"):
        fxamp.freeze(amp, consume=True)
    with torch.no_grad():
        assert torch.equal(amp(torch.ones(1, 16)), expected)


class _Numbers(_Counts):
    """Numbers its calls."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.calls


def test_a_counter_in_python_does_not_count_the_example() -> None:
    model = _Numbers().eval()
    frozen = fxamp.freeze(_convert(copy.deepcopy(model)), (torch.ones(2, 8),))
    for _ in range(2):
        with torch.no_grad():
            with autocast(BF16):
                expected = model(torch.ones(2, 8))
            assert torch.equal(frozen(torch.ones(2, 8)), expected)


def test_a_frozen_resnet18_casts_its_images_and_nothing_else() -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    images = torch.randn(1, 3, 32, 32)
    frozen = fxamp.freeze(_convert(model), (images,))
    with torch.no_grad():
        with Casts() as eagers, autocast(BF16):
            expected = model(images)
        frozen(images)
        with Casts() as ours:
            assert torch.equal(frozen(images), expected)
    assert ours.shapes == [(1, 3, 32, 32)]
    assert len(eagers.shapes) == 23
