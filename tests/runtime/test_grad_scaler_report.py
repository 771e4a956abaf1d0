"""What ``GradScaler`` adds to torch's: the report of each step, the floor, and the warning."""

import gc
import math
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fxamp.runtime import grad_scaler
from fxamp.runtime.grad_scaler import GradScaler, StepOutcome

INF, NAN = math.inf, math.nan
SKIPPED = StepOutcome(stepped=False, nonfinite=("weight",))
STEPPED = StepOutcome(stepped=True)

PLAIN: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "adam foreach": partial(Adam, lr=0.1, foreach=True),
}
FUSED: dict[str, Callable[..., Optimizer]] = {
    cls.__name__: partial(cls, lr=0.1, fused=True) for cls in (SGD, Adagrad, Adam, AdamW)
}
MAKERS = {**PLAIN, **FUSED}


def _pair(maker: str, *, named: bool = True) -> Optimizer:
    pair = [("weight", nn.Parameter(torch.ones(3))), ("bias", nn.Parameter(torch.ones(3)))]
    return MAKERS[maker](pair if named else [parameter for _, parameter in pair])


def _iterate(scaler: torch.amp.GradScaler, optimizer: Optimizer, factor: float, bias: float = 1.0) -> None:
    """A step whose gradients are *factor* in the weight and *bias* in the bias."""
    optimizer.zero_grad()
    parameters = optimizer.param_groups[0]["params"]
    scaler.scale((parameters[0] * factor).sum() + (parameters[1] * bias).sum()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("maker", MAKERS)
def test_last_step_tells_who_stepped_and_who_was_not_finite(maker: str) -> None:
    scaler, optimizer = GradScaler("cpu"), _pair(maker)
    for factor, expected in ((1.0, STEPPED), (INF, SKIPPED), (1.0, STEPPED), (NAN, SKIPPED)):
        before = optimizer.param_groups[0]["params"][1].detach().clone()
        _iterate(scaler, optimizer, factor)
        assert scaler.last_step[optimizer] == expected
        assert torch.equal(before, optimizer.param_groups[0]["params"][1]) is not expected.stepped
        scaler.update()
        assert dict(scaler.last_step) == {optimizer: expected}


@pytest.mark.parametrize(
    ("named", "given", "expected"), [(1, 1, "weight"), (0, 1, "w"), (0, 0, "group 0, parameter 0")]
)
def test_names_are_the_optimizers_then_the_given_then_the_place(
    named: int, given: int, expected: str
) -> None:
    scaler, optimizer = GradScaler("cpu"), _pair("sgd", named=bool(named))
    scaler.name_parameters([("w", optimizer.param_groups[0]["params"][0])] * given)
    _iterate(scaler, optimizer, INF)
    assert scaler.last_step[optimizer].nonfinite == (expected,)


@pytest.mark.parametrize("factors", [(1.0, INF), (INF, 1.0), (INF, INF)])
@pytest.mark.parametrize("maker", ["sgd", *FUSED])
def test_two_optimizers_have_an_outcome_each_also_after_update(
    maker: str, factors: tuple[float, ...]
) -> None:
    scaler, optimizers = GradScaler("cpu"), [_pair(maker), _pair(maker)]
    for optimizer, factor in zip(optimizers, factors, strict=True):
        _iterate(scaler, optimizer, factor)
    scaler.update()
    assert [scaler.last_step[each].stepped for each in optimizers] == [factor == 1.0 for factor in factors]


@pytest.mark.parametrize("maker", FUSED)
@pytest.mark.parametrize("end", ["to none", "to zero", "accumulate"])
def test_a_fused_step_never_names_by_gradients_that_came_later(maker: str, end: str) -> None:
    scaler, optimizer = GradScaler("cpu"), _pair(maker)
    _iterate(scaler, optimizer, INF)
    if end != "accumulate":
        optimizer.zero_grad(set_to_none=end == "to none")
    sum((each * NAN).sum() for each in optimizer.param_groups[0]["params"]).backward()
    assert scaler.last_step[optimizer] == StepOutcome(stepped=False, nonfinite=())


def test_an_outcome_that_was_read_stays_and_an_older_report_does_not_move() -> None:
    scaler, optimizer = GradScaler("cpu"), _pair("Adam")
    _iterate(scaler, optimizer, INF)
    report = scaler.last_step
    optimizer.zero_grad()
    assert scaler.last_step[optimizer] == SKIPPED
    scaler.update()
    _iterate(scaler, optimizer, 1.0)
    assert (report[optimizer], scaler.last_step[optimizer]) == (SKIPPED, STEPPED)


@pytest.mark.parametrize("maker", ["sgd", "Adam"])
def test_a_scaler_keeps_neither_optimizers_nor_parameters_alive(maker: str) -> None:
    scaler, optimizer = GradScaler("cpu"), _pair(maker)
    scaler.name_parameters([("weight", optimizer.param_groups[0]["params"][0])])
    _iterate(scaler, optimizer, INF)
    report = scaler.last_step
    assert (len(report), len(scaler._names), optimizer in report) == (1, 1, True)
    del optimizer
    gc.collect()
    assert (len(report), len(scaler._names), len(scaler.last_step)) == (0, 0, 0)


def test_an_optimizer_without_a_step_is_a_key_error_that_says_so() -> None:
    with pytest.raises(KeyError, match="has made no step of this SGD"):
        GradScaler("cpu").last_step[_pair("sgd")]


class _Slotted:
    """An optimizer that nothing can refer to weakly."""

    __slots__ = ("param_groups", "step")

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups, self.step = optimizer.param_groups, optimizer.step


def test_an_optimizer_that_cannot_be_referred_to_weakly_steps_without_a_report() -> None:
    scaler, optimizer = GradScaler("cpu"), _pair("sgd")
    weight = optimizer.param_groups[0]["params"][0]
    scaler.scale(weight.sum()).backward()
    scaler.step(_Slotted(optimizer))  # type: ignore[arg-type]
    assert weight.tolist() == pytest.approx([0.9] * 3)
    assert len(scaler.last_step) == 0


def test_a_sparse_gradient_is_named() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    scaler, optimizer = GradScaler("cpu"), SGD(embedding.named_parameters(), lr=0.1)
    scaler.scale(embedding(torch.tensor([1, 1])).sum() * INF).backward()
    scaler.step(optimizer)
    assert scaler.last_step[optimizer] == SKIPPED


@pytest.mark.parametrize("maker", MAKERS)
def test_clipping_spreads_a_nan_to_the_names_but_not_an_inf(maker: str) -> None:
    for factor, names in ((INF, ("weight",)), (NAN, ("weight", "bias"))):
        scaler, optimizer = GradScaler("cpu"), _pair(maker)
        parameters = optimizer.param_groups[0]["params"]
        scaler.scale((parameters[0] * factor).sum() + parameters[1].sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        assert scaler.last_step[optimizer] == StepOutcome(stepped=False, nonfinite=names)


def test_a_pickle_has_no_report_and_still_scales() -> None:
    scaler, optimizer = GradScaler("cpu", min_scale=2.0), _pair("Adam")
    scaler.name_parameters([("weight", optimizer.param_groups[0]["params"][0])])
    _iterate(scaler, optimizer, INF)
    scaler.update()
    again = pickle.loads(pickle.dumps(scaler))
    assert (len(again.last_step), again.state_dict()) == (0, scaler.state_dict())
    _iterate(again, optimizer, INF)
    again.update(1.0)
    assert (again.last_step[optimizer], again.get_scale()) == (SKIPPED, 2.0)


def test_a_disabled_scaler_always_stepped() -> None:
    scaler, optimizer = GradScaler("cpu", enabled=False, min_scale=1.0), _pair("sgd")
    _iterate(scaler, optimizer, INF)
    scaler.update()
    assert (scaler.last_step[optimizer], scaler.state_dict(), scaler.get_scale()) == (STEPPED, {}, 1.0)


# ---- min_scale and the warning --------------------------------------------------------------


def _scales(scaler: GradScaler, optimizer: Optimizer, factors: list[float]) -> list[float]:
    """The scale after each iteration."""
    scales = []
    for factor in factors:
        _iterate(scaler, optimizer, factor)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("maker", MAKERS)
def test_min_scale_is_a_floor_from_which_the_scale_grows_again(maker: str) -> None:
    scaler = GradScaler("cpu", 8.0, growth_interval=2, min_scale=3.0)
    factors = [INF, INF, NAN, 1.0, 1.0, INF, INF]
    assert _scales(scaler, _pair(maker), factors) == [4.0, 3.0, 3.0, 3.0, 6.0, 3.0, 3.0]


def test_min_scale_holds_for_a_scale_that_starts_or_is_set_below_it() -> None:
    scaler, optimizer = GradScaler("cpu", 0.5, min_scale=1.0), _pair("sgd")
    assert _scales(scaler, optimizer, [1.0]) == [1.0]
    scaler.update(0.25)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("floor", [0.0, -1.0, INF, NAN])
def test_a_floor_that_is_none_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="min_scale must be positive and finite"):
        GradScaler("cpu", min_scale=floor)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_scale_falling_below_1_warns_once_with_names_and_at_the_call(maker: str) -> None:
    scaler, optimizer = GradScaler("cpu", 4.0), _pair(maker)
    assert _scales(scaler, optimizer, [INF, INF]) == [2.0, 1.0]
    with pytest.warns(UserWarning, match=r"fell to 0\.5, below 1, .*: last those of weight\n") as caught:
        _scales(scaler, optimizer, [INF])
    assert [each.filename for each in caught] == [__file__]
    assert _scales(scaler, optimizer, [INF] * 3) == [0.25, 0.125, 0.0625]  # a second one would be an error
    scaler.update(4.0)
    assert _scales(scaler, optimizer, [INF] * 3) == [2.0, 1.0, 0.5]


def test_the_warning_names_five_and_counts_the_rest() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    scaler, optimizer = GradScaler("cpu", 1.0), SGD(model.parameters(), lr=0.1)
    scaler.name_parameters(model.named_parameters())
    scaler.scale(torch.stack([each.sum() for each in model.parameters()]).sum() * INF).backward()
    scaler.step(optimizer)
    with pytest.warns(
        UserWarning, match=r"last those of 0\.weight, 0\.bias, 1\.weight, 1\.bias, 2\.weight and 3 more\n"
    ):
        scaler.update()


def test_unscaling_without_a_step_warns_too_and_names_no_one() -> None:
    scaler, optimizer = GradScaler("cpu", 1.0), _pair("sgd")
    scaler.scale(optimizer.param_groups[0]["params"][0].sum() * INF).backward()
    scaler.unscale_(optimizer)
    with pytest.warns(UserWarning, match=r"still have Inf or NaN\n"):
        scaler.update()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("how", ["init", "update", "load"])
def test_a_low_scale_set_by_hand_has_not_fallen_until_it_falls(maker: str, how: str) -> None:
    scaler, optimizer = GradScaler("cpu", 0.7 if how == "init" else 8.0), _pair(maker)
    if how != "init":
        _scales(scaler, optimizer, [1.0])
    if how == "update":
        scaler.update(0.7)
    if how == "load":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.7})
    _scales(scaler, optimizer, [1.0, 1.0])
    with pytest.warns(UserWarning, match=r"fell to 0\.35"):
        _scales(scaler, optimizer, [INF])


class _Mail:
    """Copies of the scale that reach the host when the test lets them."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.arrives = True

    def send(self, scale: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        self.sent.append(scale.item())
        return scale.clone(), lambda: self.arrives


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> _Mail:
    mail = _Mail()
    monkeypatch.setattr(grad_scaler, "_send_to_host", mail.send)
    return mail


@pytest.mark.parametrize("maker", MAKERS)
def test_a_copy_of_the_scale_that_reaches_the_host_late_warns_late(maker: str, mail: _Mail) -> None:
    scaler, optimizer = GradScaler("cpu", 4.0), _pair(maker)
    _scales(scaler, optimizer, [INF])
    mail.arrives = False
    assert _scales(scaler, optimizer, [INF, INF]) == [1.0, 0.5]
    assert mail.sent == [4.0, 2.0, 1.0]  # no second copy while one is on its way
    mail.arrives = True
    with pytest.warns(UserWarning, match=r"fell to 0\.25, .*: last those of weight"):
        _scales(scaler, optimizer, [INF])


@pytest.mark.parametrize("maker", PLAIN)
def test_a_late_warning_during_good_steps_still_names_the_last_bad_ones(maker: str, mail: _Mail) -> None:
    scaler, optimizer = GradScaler("cpu", 1.0), _pair(maker)
    mail.arrives = False
    _iterate(scaler, optimizer, 1.0)
    mail.arrives = True
    scaler.update()
    mail.arrives = False
    _scales(scaler, optimizer, [INF, 1.0])
    mail.arrives = True
    with pytest.warns(UserWarning, match=r"fell to 0\.5, .*: last those of weight"):
        _scales(scaler, optimizer, [1.0])
    assert mail.sent == [1.0, 0.5]  # none for a step that was taken
