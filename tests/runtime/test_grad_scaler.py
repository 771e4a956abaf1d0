"""``GradScaler`` beside ``torch.amp.GradScaler``: the same calls, the same bits, the same errors."""

import copy
import inspect
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.testing._internal.common_cuda import _create_scaling_case
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.runtime.grad_scaler import GradScaler

INF, NAN = math.inf, math.nan

# Fused SGD here is without momentum: where its first step is skipped, torch leaves that uninitialized.
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "sgd foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": partial(SGD, lr=0.1, fused=True),
    "adam": partial(Adam, lr=0.1),
    "adam foreach": partial(Adam, lr=0.1, foreach=True),
    "adam fused": partial(Adam, lr=0.1, fused=True),
    "adamw": partial(AdamW, lr=0.1),
    "adamw foreach": partial(AdamW, lr=0.1, foreach=True),
    "adamw fused": partial(AdamW, lr=0.1, fused=True),
    "adagrad fused": partial(Adagrad, lr=0.1, fused=True),
}


class Side:
    """One scaler with two models of two parameters and their optimizers."""

    def __init__(self, scaler: torch.amp.GradScaler, maker: str, dtype: torch.dtype = torch.float32) -> None:
        self.scaler = scaler
        values = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.models = [[nn.Parameter(value.clone()) for value in model] for model in values]
        self.optimizers = [MAKERS[maker](model) for model in self.models]

    def call(self, name: str, *args: Any) -> str:
        """The result of a row of CALLS, or its error, as text."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return repr(CALLS[name](self, *args))
        except Exception as error:  # noqa: BLE001 - which error it is, is what gets compared
            return f"{type(error).__name__}: {error}"

    def bits(self) -> list[Any]:
        """Every bit that the run depends on: parameters, gradients, both kinds of state."""
        parameters = [parameter for model in self.models for parameter in model]
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        seen = self.scaler._per_optimizer_states
        kept = [seen.get(id(each), {}) for each in self.optimizers]
        stages = [(each.get("stage"), each.get("found_inf_per_device")) for each in kept]
        tensors = (parameters, [each.grad for each in parameters], states, self.scaler._scale, stages)
        return [_bits(tensors), self.scaler.state_dict(), self.scaler._get_growth_tracker()]


def _backward(side: Side, which: int, factor: float) -> None:
    loss = torch.stack([(parameter * parameter).sum() for parameter in side.models[which]]).sum()
    side.scaler.scale(loss * factor).backward()


def _poison(side: Side, which: int, value: float) -> None:
    gradient = side.models[which][1].grad
    if gradient is not None:
        gradient[1] = value


def _reload(side: Side) -> None:
    state, side.scaler = side.scaler.state_dict(), type(side.scaler)("cpu", growth_interval=9)
    side.scaler.load_state_dict(state)


def _replace(side: Side, copied: Callable[[torch.amp.GradScaler], torch.amp.GradScaler]) -> None:
    side.scaler = copied(side.scaler)


CALLS: dict[str, Callable[..., Any]] = {
    "backward": _backward,
    "poison": _poison,
    "scale many": lambda side: side.scaler.scale([torch.ones(2), (torch.ones((), dtype=torch.float16),)]),
    "unscale": lambda side, which: side.scaler.unscale_(side.optimizers[which]),
    "clip": lambda side, which: nn.utils.clip_grad_norm_(side.models[which], 1.0),
    "step": lambda side, which, *closure: side.scaler.step(side.optimizers[which], *closure),
    "step by keyword": lambda side, which: side.scaler.step(side.optimizers[which], closure=lambda: 1.0),
    "update": lambda side, *scale: side.scaler.update(*scale),
    "zero grad": lambda side, which, none: side.optimizers[which].zero_grad(set_to_none=bool(none)),
    "growth interval": lambda side, interval: side.scaler.set_growth_interval(interval),
    "reload": _reload,
    "pickle": lambda side: _replace(side, lambda scaler: pickle.loads(pickle.dumps(scaler))),
    "deepcopy": lambda side: _replace(side, copy.deepcopy),
}


def _bits(value: Any) -> Any:
    """*value* with bytes for its tensors, so that a NaN equals itself and -0.0 is not 0.0."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bytes(value.detach().reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {str(key): _bits(each) for key, each in value.items()}
    return [_bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def _sides(maker: str, dtype: torch.dtype = torch.float32) -> tuple[Side, Side]:
    options: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
    return Side(torch.amp.GradScaler("cpu", **options), maker, dtype), Side(
        GradScaler("cpu", **options), maker, dtype
    )


def _check(maker: str, calls: Sequence[tuple[Any, ...]], dtype: torch.dtype = torch.float32) -> None:
    theirs, ours = _sides(maker, dtype)
    for call in calls:
        assert ours.call(*call) == theirs.call(*call), call
        assert ours.bits() == theirs.bits(), call


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_with_inf_and_nan_at_chosen_steps_gives_torchs_bits(
    maker: str, clip: int, accumulate: int
) -> None:
    calls: list[tuple[Any, ...]] = []
    for step, which in itertools.product(range(9), range(2)):
        calls += [("backward", which, 0.5)] * accumulate
        calls += [("poison", which, value) for at, value in {2 + which: INF, 5: NAN}.items() if at == step]
        calls += [("unscale", which), ("clip", which)] if clip else []
        calls += [("step", which, *[lambda: 2.0] * (step % 2)), ("zero grad", which, step % 2)]
        calls += [("update",)] * which
    _check(maker, calls)


_WHICH = st.integers(0, 1)
_FACTORS = st.sampled_from([1.0, 1.0, 1e30, INF, NAN])
_CALL = st.one_of(
    st.tuples(st.just("backward"), _WHICH, _FACTORS),
    st.tuples(st.just("poison"), _WHICH, _FACTORS),
    st.tuples(st.sampled_from(["unscale", "step", "clip", "step by keyword"]), _WHICH),
    st.tuples(st.just("step"), _WHICH, st.just(lambda: 2.0)),
    st.tuples(st.just("zero grad"), _WHICH, _WHICH),
    st.tuples(st.just("growth interval"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["update", "reload", "pickle", "deepcopy", "scale many"])),
    st.tuples(st.just("update"), st.sampled_from([3.0, 7, torch.tensor(0.5), torch.ones(1), torch.ones(2)])),
)  # fmt: skip
_CALLS = st.lists(
    st.one_of(
        _CALL.map(lambda call: [call]),
        st.tuples(_WHICH, _FACTORS).map(lambda it: [("backward", *it), ("step", it[0]), ("update",)]),
        st.tuples(_WHICH, _FACTORS).map(lambda it: [("backward", *it), ("unscale", it[0]), ("step", it[0])]),
    ),
    max_size=8,
).map(lambda groups: list(itertools.chain(*groups)))
_DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@settings(max_examples=150, deadline=None)
@given(maker=st.sampled_from(sorted(MAKERS)), calls=_CALLS, dtype=_DTYPES)
def test_any_sequence_of_calls_does_and_raises_what_it_does_in_torch(
    maker: str, calls: list[tuple[Any, ...]], dtype: torch.dtype
) -> None:
    _check(maker, calls, dtype)


@pytest.mark.parametrize("maker", [SGD, partial(Adam, fused=True)])
def test_torchs_own_scaling_case_gives_the_same_parameters(maker: Callable[..., Optimizer]) -> None:
    control, scaling, *optimizers, data, loss_of, skip = _create_scaling_case("cpu", optimizer_ctor=maker)
    scalers = torch.amp.GradScaler("cpu", growth_interval=1), GradScaler("cpu", growth_interval=1)
    for model, optimizer, scaler in zip((control, scaling), optimizers, scalers, strict=True):
        for at, (x, target) in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), target) * (INF if at == skip else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(map(torch.equal, control.parameters(), scaling.parameters()))
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("classes", [(torch.amp.GradScaler, GradScaler), (GradScaler, torch.amp.GradScaler)])
def test_a_state_dict_resumes_in_the_other_class_with_the_bits_of_the_whole_run(
    classes: tuple[type[torch.amp.GradScaler], ...],
) -> None:
    whole, resumed = (Side(cls("cpu", 8.0, growth_interval=2), "adamw foreach") for cls in classes)
    for at, factor in enumerate([1.0, INF, 1.0, 1.0, NAN, 1.0]):
        if at == 3:
            state, resumed.scaler = resumed.scaler.state_dict(), classes[0]("cpu")
            resumed.scaler.load_state_dict(state)
        for call in (("backward", 0, factor), ("step", 0), ("update",)):
            assert resumed.call(*call) == whole.call(*call)
    assert resumed.bits() == whole.bits()


def test_the_signature_is_torchs_with_min_scale_behind_it() -> None:
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    *ours, last = inspect.signature(GradScaler).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]
    assert (last.name, last.default, last.kind) == ("min_scale", None, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_wrong_factors_raise_what_they_raise_in_torch(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError) as theirs:
        torch.amp.GradScaler("cpu", **wrong)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=str(theirs.value)):
        GradScaler("cpu", **wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is disabled")
def test_cuda_without_a_gpu_warns_as_torch_and_disables() -> None:
    with pytest.warns(UserWarning, match="Disabling") as theirs:
        torch.amp.GradScaler("cuda")
    with pytest.warns(UserWarning, match="Disabling") as ours:
        scaler = GradScaler("cuda")
    assert [str(each.message) for each in ours] == [str(each.message) for each in theirs]
    assert not scaler.is_enabled()


class _Operators(TorchDispatchMode):
    """Writes down the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _operators(scaler: torch.amp.GradScaler, maker: str) -> list[str]:
    side = Side(scaler, maker)
    _backward(side, 0, 1.0)
    with _Operators() as ran:
        for _ in range(3):
            scaler.step(side.optimizers[0])
            scaler.update()
    return sorted(ran.names)


@pytest.mark.parametrize("maker", MAKERS)
def test_steps_that_are_taken_run_torchs_operators_and_read_nothing_more(maker: str) -> None:
    theirs = _operators(torch.amp.GradScaler("cpu"), maker)
    clones = ["aten.clone.default"] * 3 * ("fused" in maker)  # of found_inf: for the device, unread
    floors = ["aten.clamp_.default"] * 3
    assert theirs.count("aten._local_scalar_dense.default") >= 3 * ("fused" not in maker)  # found_inf, read
    assert _operators(GradScaler("cpu", min_scale=1.0), maker) == sorted(theirs + clones + floors)
    if "fused" not in maker:
        assert _operators(GradScaler("cpu"), maker) == theirs
