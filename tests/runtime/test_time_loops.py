"""A recurrent operator that loops over time in C++ is one node, whatever the length, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.capture.time_loops import is_time_loop
from fxamp.ir.cost import cost_of
from fxamp.ir.regions import Region
from fxamp.ir.text import show
from tests.counts import Counts
from tests.models import equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
]

BF16 = torch.bfloat16
REGION = Region("cpu", enabled=True, dtype=BF16)
LENGTHS = (6, 9, 2)

Make = Callable[..., nn.Module]
KINDS: dict[str, Make] = {
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "LSTM with projection": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first, two ways": {"batch_first": True, "bidirectional": True},
    "layers with dropout, without biases": {"num_layers": 2, "dropout": 0.3, "bias": False},
}


class Packed(nn.Module):
    """Takes sequences of several lengths."""

    def __init__(self, recurrent: Any) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        """The padded outputs, and the last states."""
        first = self.recurrent.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        outputs, state = self.recurrent(packed)
        return pad_packed_sequence(outputs, batch_first=first)[0], state


class Shared(nn.Module):
    """Calls one cell of recurrence twice, and its input weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The same weights, three times."""
        h, _ = self.recurrent(x)
        h, _ = self.recurrent(h)
        weight: Any = self.recurrent.weight_ih_l0
        return nn.functional.linear(h, weight)


def run(model: nn.Module, call: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor | None]:
    """What a call gives: outputs, where gradients are recorded those too, and what is drawn next."""
    model.zero_grad()
    torch.manual_seed(1)
    own = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    outputs = pytree.tree_leaves(call(*own))
    found: list[Tensor | None] = list(outputs)
    if torch.is_grad_enabled():
        loss = sum((out.float() * torch.arange(out.numel()).view(out.shape)).sum() for out in outputs)
        assert isinstance(loss, Tensor)
        loss.backward()
        found += [weight.grad for weight in model.parameters()]
        found += [arg.grad for arg in own]
    return [*found, torch.rand(1)]


def assert_like_eager(model: nn.Module, amp: nn.Module, *args: Tensor) -> None:
    def eager(*given: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return model(*given)

    expected, got = run(model, eager, args), run(model, amp, args)
    assert all(equal(one, other) for one, other in zip(got, expected, strict=True))
    assert [one.stride() for one in got if one is not None] == [
        other.stride() for other in expected if other is not None
    ]


def sequence(length: int, form: str = "plain", *, leaf: bool = False) -> Tensor:
    torch.manual_seed(length)
    shape = (3, length, 5) if "batch first" in form else (length, 3, 5)
    return torch.randn(shape).requires_grad_(leaf)


def captures_of(amp: Any) -> int:
    return len(amp._runner.all_programs())


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("training", [False, True])
def test_one_program_serves_sequences_of_any_length(kind: str, form: str, training: bool) -> None:
    torch.manual_seed(0)
    model = KINDS[kind](5, 6, **FORMS[form]).train(training)
    amp = fxamp.convert(model, dtype=BF16)
    with torch.set_grad_enabled(training):
        for length in LENGTHS:
            assert_like_eager(model, amp, sequence(length, form, leaf=True))
    assert captures_of(amp) == 1


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("kind", [*KINDS, "LSTM"])
@pytest.mark.parametrize("training", [False, True])
def test_packed_sequences_have_the_bits_of_eager(kind: str, form: str, training: bool) -> None:
    torch.manual_seed(0)
    make = KINDS.get(kind, nn.LSTM)
    model = Packed(make(5, 6, **FORMS[form])).train(training)
    amp = fxamp.convert(model, dtype=BF16)
    with torch.set_grad_enabled(training):
        for length in LENGTHS:
            lengths = torch.tensor([length, length - 1, length])
            assert_like_eager(model, amp, sequence(length, form, leaf=True), lengths)


@pytest.mark.parametrize("leaf", [False, True])
def test_a_state_that_is_given_has_the_gradients_of_eager(leaf: bool) -> None:
    model = nn.GRU(5, 6, 2)
    amp = fxamp.convert(model, dtype=BF16)
    for length in LENGTHS:
        assert_like_eager(model, amp, sequence(length, leaf=leaf), torch.randn(2, 3, 6).requires_grad_(leaf))


def test_weights_of_several_loops_are_cast_once_and_their_gradients_added_as_in_eager() -> None:
    model = Shared()
    amp = fxamp.convert(model, dtype=BF16)
    for length in LENGTHS:
        assert_like_eager(model, amp, torch.randn(length, 3, 6))
    weights = [node for node in amp.graph_module.graph.nodes if node.meta.get("kept")]
    assert len(weights) == len(list(model.parameters()))


class Uncached(nn.Module):
    """A loop in a region that keeps no casts."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(5, 6)

    def forward(self, x: Tensor) -> Any:
        """Each step casts the weights."""
        with torch.autocast("cpu", BF16, cache_enabled=False):
            return self.recurrent(x)


def test_without_the_cache_the_gradients_of_each_steps_cast_are_added_as_in_eager() -> None:
    model = Uncached()
    amp = fxamp.convert(model, dtype=BF16)
    for length in LENGTHS:
        assert_like_eager(model, amp, sequence(length, leaf=True))


def test_weights_that_do_not_train_are_cast_before_the_loop() -> None:
    model = nn.GRU(5, 6).requires_grad_(requires_grad=False)
    amp = fxamp.convert(model, dtype=BF16)
    assert_like_eager(model, amp, sequence(7, leaf=True))
    assert show(amp.graph_module).count("_bf16: bf16") == 5


def test_in_inference_mode_too() -> None:
    model = nn.GRU(5, 6).eval()
    amp = fxamp.convert(model, dtype=BF16)
    with torch.inference_mode():
        for length in LENGTHS:
            assert_like_eager(model, amp, sequence(length))
    assert captures_of(amp) == 1


def test_the_loop_is_one_node_with_its_weights_cast_before() -> None:
    amp = fxamp.convert(nn.GRU(5, 6).eval(), dtype=BF16)
    with torch.no_grad():
        amp(torch.ones(7, 3, 5))
    text = show(amp.graph_module)
    (line,) = [line for line in text.splitlines() if "gru" in line.partition("=")[0]]
    shape, state = line.partition("f32[")[2].partition("]")[0], "f32[1, "
    assert shape.count("s") == 2  # the length and the batch
    assert state in line
    assert "run_in_region(autocast(cpu, bf16), aten::gru.input, %input_1_bf16, %zeros, [%weight_ih" in line
    assert text.count(", bf16)\n") == 5  # four weights and the input


def test_a_frozen_loop_casts_no_weight() -> None:
    model = nn.GRU(5, 6, 2, bidirectional=True).eval()
    x = sequence(7)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), (x,))
    with torch.no_grad():
        assert_like_eager(model, frozen, x)
        assert_like_eager(model, frozen, sequence(11))
        with Counts(frozen.parameters()) as counts:
            frozen(x)
    assert counts.weight_casts == 0


def test_a_frozen_loop_over_packed_sequences_casts_no_weight() -> None:
    model = Packed(nn.LSTM(5, 6)).eval()
    args = sequence(7), torch.tensor([7, 3, 5])
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), args)
    with torch.no_grad():
        assert_like_eager(model, frozen, *args)
        with Counts(frozen.parameters()) as counts:
            frozen(*args)
    assert counts.weight_casts == 0


def test_the_report_says_why_the_loop_is_in_a_region() -> None:
    amp = fxamp.convert(nn.GRU(5, 6).eval(), dtype=BF16)
    with torch.no_grad():
        amp(torch.ones(7, 3, 5))
    (row,) = [row for row in amp.report().operators if row.op == "aten::gru.input"]
    assert row.rule.startswith("kept in a region: a loop over time: linear on the weights")
    assert len(row.casts) == 5


def test_the_cost_of_the_loop_grows_with_the_length() -> None:
    amp = fxamp.convert(nn.GRU(5, 6).eval(), dtype=BF16)
    with torch.no_grad():
        amp(torch.ones(7, 3, 5))
    (step,) = [step for step in cost_of(amp.graph_module).steps if step.name == "gru"]
    assert str(step.flops) == f"{2 * (18 * 5 + 18 * 6)}*input_1_0*input_1_1"
    assert step.dtype is BF16


def test_under_another_policy_the_steps_are_in_the_graph() -> None:
    policy = fxamp.Policy.native("cpu", BF16).keep("float32", op=torch.sigmoid)
    amp = fxamp.convert(nn.GRU(5, 6).eval(), policy=policy)
    with torch.no_grad():
        amp(torch.ones(3, 2, 5))
    names = [node.name for node in amp.graph_module.graph.nodes]
    assert sum(name.startswith("tanh") for name in names) == 3


class _Seen(TorchDispatchMode):
    """Which operators are dispatched; the kernel may be missing on this machine."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("projection", [0, 3])
def test_the_dispatcher_agrees_on_where_lstm_is_a_loop(
    projection: int, dtype: torch.dtype, onednn: bool
) -> None:
    model = nn.LSTM(5, 6, proj_size=projection, dtype=dtype)
    x = torch.randn(4, 3, 5, dtype=dtype)
    state = (torch.zeros(1, 3, projection or 6, dtype=dtype), torch.zeros(1, 3, 6, dtype=dtype))
    args = (x, state, list(model.parameters()), True, 1, 0.0, False, False, False)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=onednn), _Seen() as seen:
        assert is_time_loop(torch.ops.aten.lstm.input, args, REGION) is not (
            "aten::mkldnn_rnn_layer" in _names(seen, args)
        )


def _names(seen: _Seen, args: Any) -> set[str]:
    torch.ops.aten.lstm.input(*args)
    return seen.names
