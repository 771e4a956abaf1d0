"""``torch.compile`` with the backend fxamp against eager autocast, bit for bit."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.runtime.dynamo_backend import fxamp_backend
from tests.models import SmallCNN, SmallTransformer, autocast, equal, run
from tests.runtime.dynamo_models import (
    Branching,
    Broken,
    ChannelsLast,
    Checkpointed,
    EagerBetween,
    InnerRegions,
    Layer,
    Mapped,
    NoGrad,
    OwnFunction,
    ReentrantCheckpointed,
    Tied,
)

BF16 = torch.bfloat16

# Dynamo's own, with any backend: it looks at .grad of every input of a graph, and torch 2.13 makes an
# instance of an autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def fallbacks(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What runs without a program is logged."""
    caplog.set_level(logging.WARNING, "fxamp")
    return caplog


def region() -> torch.autocast:
    return autocast(BF16)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=fxamp_backend, options=options)


def assert_same(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    around: Callable[[], Any] = region,
    eager: Callable[[], Any] = region,
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    """Two steps of training with *model* compiled, and eagerly: everything is the same."""
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    call = torch.compile(ours, backend=fxamp_backend, dynamic=dynamic, options=options)
    for _ in range(2):
        expected = run(theirs, theirs, args, kwargs or {}, eager())
        found = run(ours, call, args, kwargs or {}, around())
        assert all(map(equal, found["outputs"], expected["outputs"])), "outputs differ"
        for what in ("gradients", "buffers"):
            for name in expected[what]:
                assert equal(found[what][name], expected[what][name]), f"{what} of {name} differ"
        assert torch.equal(found["random"], expected["random"]), "the random state differs"


SQUARE = [Broken, EagerBetween, Tied, InnerRegions, NoGrad, OwnFunction, Checkpointed]
SQUARE += [ReentrantCheckpointed, Branching, Mapped]


def test_an_mlp() -> None:
    assert_same(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(5, 4),))


@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_batchnorm_and_dropout(training: bool) -> None:
    assert_same(SmallCNN().train(training), (torch.randn(2, 3, 8, 8),))


def test_a_transformer_with_keywords() -> None:
    assert_same(SmallTransformer(blocks=1), (torch.randint(0, 30, (2, 7)),), {"scale": 2.0})


@pytest.mark.parametrize("model", SQUARE, ids=lambda model: model.__name__)
def test_inside_a_region(model: type[nn.Module], fallbacks: pytest.LogCaptureFixture) -> None:
    assert_same(model(), (torch.randn(6, 6),))
    assert fallbacks.text == ""


def test_a_weight_in_another_order_in_memory_on_both_sides_of_a_break() -> None:
    assert_same(ChannelsLast(), (torch.randn(2, 4, 5, 5),))


@pytest.mark.parametrize("model", [Tied, InnerRegions, Checkpointed], ids=lambda model: model.__name__)
def test_the_option_dtype_stands_for_a_region(model: type[nn.Module]) -> None:
    assert_same(model(), (torch.randn(6, 6),), around=nullcontext, dtype=BF16)


def test_the_option_policy_stands_for_a_region() -> None:
    policy = fxamp.Policy.native("cpu", torch.float16)
    eager = lambda: autocast(torch.float16)  # noqa: E731
    assert_same(Tied(), (torch.randn(6, 6),), around=nullcontext, eager=eager, policy=policy)


@pytest.mark.parametrize("model", [Tied, InnerRegions, Checkpointed], ids=lambda model: model.__name__)
def test_without_region_and_options_only_the_models_own_regions_count(model: type[nn.Module]) -> None:
    assert_same(model(), (torch.randn(6, 6),), around=nullcontext, eager=nullcontext)


def test_the_users_region_goes_before_the_options() -> None:
    assert_same(Tied(), (torch.randn(6, 6),), dtype=torch.float16)
    off = lambda: torch.autocast("cpu", enabled=False)  # noqa: E731
    assert_same(Tied(), (torch.randn(6, 6),), around=off, eager=off, dtype=BF16)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model", [Broken, Checkpointed], ids=lambda model: model.__name__)
def test_a_checkpoint_around(
    model: type[nn.Module], reentrant: bool, fallbacks: pytest.LogCaptureFixture
) -> None:
    theirs, x = model(), torch.randn(6, 6, requires_grad=True)
    ours = copy.deepcopy(theirs)
    call = compiled(ours)
    expected = run(theirs, lambda x: checkpoint(theirs, x, use_reentrant=reentrant), (x,), {}, region())
    found = run(ours, lambda x: checkpoint(call, x, use_reentrant=reentrant), (x,), {}, region())
    assert equal(found["outputs"][0], expected["outputs"][0])
    assert all(equal(grad, expected["gradients"][name]) for name, grad in found["gradients"].items())
    assert fallbacks.text == ""


def test_the_leafness_of_a_weight_that_is_an_argument() -> None:
    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ (x @ weight).tanh()) @ weight

    call, x, weight = compiled(twice), torch.randn(6, 6), torch.randn(6, 6, requires_grad=True)
    for operator in (torch.Tensor.contiguous, torch.clone, torch.Tensor.contiguous, torch.t):
        gradients: list[Tensor] = []
        for function in (twice, call):
            with region():
                out = function(x, operator(weight))
            gradients += torch.autograd.grad(out.float().square().sum(), weight)
        assert equal(*gradients)


def test_two_calls_in_one_region_share_the_casts() -> None:
    theirs = nn.Linear(6, 6)
    ours, x = copy.deepcopy(theirs), torch.randn(6, 6)
    call = compiled(ours)
    expected = run(theirs, lambda x: theirs(theirs(x).tanh()), (x,), {}, region())
    found = run(ours, lambda x: call(call(x).tanh()), (x,), {}, region())
    assert equal(found["gradients"]["weight"], expected["gradients"]["weight"])


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_every_size_that_dynamo_sends(dynamic: bool | None) -> None:
    model = SmallTransformer(blocks=1).eval()
    call = torch.compile(model, backend=fxamp_backend, dynamic=dynamic)
    for shape in [(2, 7), (3, 9), (5, 4), (1, 6), (4, 1), (2, 11)]:
        tokens = torch.randint(0, 30, shape)
        with torch.no_grad(), region():
            assert equal(call(tokens)["logits"], model(tokens)["logits"]), shape


def test_one_program_serves_the_sizes_that_vary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fxamp")
    call = torch.compile(nn.Linear(4, 4), backend=fxamp_backend, dynamic=True)
    for batch in range(2, 8):
        with region():
            call(torch.randn(batch, 4))
    assert caplog.text.count("as flat code") == 1


def test_sizes_in_the_result_and_in_pieces() -> None:
    class Sized(Layer):
        def forward(self, x: Tensor, factor: int) -> tuple[Tensor, int]:
            h = checkpoint(self.layer, self.layer(x), use_reentrant=False)
            return h.reshape(x.shape[0] * 2, 3).sin() * factor, x.shape[0] * 2

    assert_same(Sized(), (torch.randn(4, 6), 7), dynamic=True)


def test_training_and_evaluation_are_graphs_of_their_own() -> None:
    model, x = SmallCNN(), torch.randn(2, 3, 8, 8)
    call = compiled(model)
    for training in (True, False, True):
        model.train(training)
        other = copy.deepcopy(model)
        expected = run(other, other, (x,), {}, region())
        found = run(model, call, (x,), {}, region())
        assert equal(found["outputs"][0], expected["outputs"][0])


def test_an_operator_with_a_gradient_in_python_runs_between_pieces(
    fallbacks: pytest.LogCaptureFixture,
) -> None:
    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            own = torch.ops.fxamp_tests.doubled(self.layer(x).relu())
            return self.layer(own).sin()  # type: ignore[no-any-return]

    with torch.library._scoped_library("fxamp_tests", "DEF"):
        doubled = torch.library.custom_op("fxamp_tests::doubled", mutates_args=())(_doubled)
        doubled.register_fake(torch.empty_like)
        doubled.register_autograd(lambda ctx, grad: 2 * grad)
        assert_same(Own(), (torch.randn(6, 6),))
    assert fallbacks.text == ""


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_what_cannot_be_captured_runs_in_the_region_and_is_named(
    fallbacks: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*args: object, **kwargs: object) -> None:
        raise fxamp.CaptureError("because of this")

    monkeypatch.setattr("fxamp.runtime.graph_piece.capture", capture)
    assert_same(Broken(), (torch.randn(6, 6),))
    assert_same(Tied(), (torch.randn(6, 6),), around=nullcontext, dtype=BF16)
    assert "without a program of fxamp: because of this" in fallbacks.text


def test_sizes_that_depend_on_values() -> None:
    class Selecting(Layer):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return self.layer(h[h.sum(1) > 0]).relu()  # type: ignore[no-any-return]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same(Selecting(), (torch.randn(6, 6),))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"types": BF16}, "no option 'types'; its options are"),
        ({"dtype": BF16, "policy": fxamp.Policy.native("cpu", torch.float16)}, "the policy is one for"),
        ({"dtype": torch.float64}, "autocast has no torch.float64 mode"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
        compiled(nn.Linear(4, 4), **options)(torch.randn(2, 4))


def test_a_mode_is_refused() -> None:
    call = torch.compile(nn.Linear(4, 4), backend=fxamp_backend, mode="max-autotune")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="has no modes"):
        call(torch.randn(2, 4))


@pytest.mark.parametrize("model", [Tied, NoGrad, InnerRegions], ids=lambda model: model.__name__)
def test_an_inner_backend_gets_the_casts_as_nodes(model: type[nn.Module]) -> None:
    targets: list[Any] = []

    def inner(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        assert not torch.is_autocast_enabled("cpu")
        targets.extend(node.target for node in module.graph.nodes)
        return module.forward

    theirs, ours = model(), model()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 6)
    expected = run(theirs, theirs, (x,), {}, region())
    found = run(ours, compiled(ours, inner=inner), (x,), {}, region())
    assert torch.ops.aten.to.dtype in targets
    assert all(map(equal, found["outputs"], expected["outputs"]))
    assert all(equal(grad, expected["gradients"][name]) for name, grad in found["gradients"].items())


def test_an_inner_backend_by_name_serves_every_size() -> None:
    theirs = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    ours = copy.deepcopy(theirs)
    call = compiled(ours, inner="aot_eager")
    for batch in (4, 7, 9, 1):
        x = torch.randn(batch, 6)
        expected = run(theirs, theirs, (x,), {}, region())
        found = run(ours, call, (x,), {}, region())
        assert equal(found["outputs"][0], expected["outputs"][0])
        assert all(equal(grad, expected["gradients"][name]) for name, grad in found["gradients"].items())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", [False, True], ids=["region", "option"])
def test_inductor_inside_is_inductor_under_autocast(option: bool) -> None:
    theirs = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    ours, x = copy.deepcopy(theirs), torch.randn(5, 6)
    expected = run(theirs, torch.compile(theirs, backend="inductor"), (x,), {}, region())
    call = compiled(ours, inner="inductor", **({"dtype": BF16} if option else {}))
    found = run(ours, call, (x,), {}, nullcontext() if option else region())
    torch.testing.assert_close(found["outputs"], expected["outputs"])
    torch.testing.assert_close(found["gradients"], expected["gradients"])
