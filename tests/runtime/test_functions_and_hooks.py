"""Custom autograd functions keep their backward; hooks of libraries are recorded, others run as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn.utils import prune

import fxamp
from tests.models import assert_like_eager, autocast, equal


class Rounded(torch.autograd.Function):
    """A product, rounded, with the gradient of one that is not; a sum; and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor, int]:
        """Of ``(rows, n)`` and ``(n, n)``."""
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return torch.round(x @ w) * scale, x.sum(), 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """As if nothing was rounded."""
        x, w = ctx.saved_tensors
        grad = grads[0]
        return grad.to(w.dtype) @ w.t() * ctx.scale, x.t().to(grad.dtype) @ grad, None


class InFloat32(torch.autograd.Function):
    """An exponential whose region is switched off by ``custom_fwd``."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of any shape."""
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        """With a product, so that its dtype shows."""
        (x,) = ctx.saved_tensors
        return grads[0] * x.exp() @ torch.eye(x.shape[-1])


class Doubled(torch.autograd.Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of any shape."""
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Twice the gradient."""
        return grads[0] * 2


class Functions(nn.Module):
    """All of them, one after the other, with weights on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(rows, 8)``."""
        y, total, count = Rounded.apply(self.a(x), self.b.weight, 2.0)
        y = Doubled.apply(InFloat32.apply(y.to(torch.bfloat16) * 0.01).clone())
        out: Tensor = self.a(y) + total * count
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_custom_functions_keep_their_backward(dtype: torch.dtype) -> None:
    amp = assert_like_eager(Functions(), (torch.randn(5, 8),), dtype=dtype)
    assert any(row.op == "Rounded" for row in amp.report().operators)


def test_custom_functions_without_gradients_are_recorded_inside() -> None:
    with torch.no_grad():
        amp = assert_like_eager(Functions(), (torch.randn(5, 8),))
    assert any(row.op == "aten::round" for row in amp.report().operators)


def test_a_function_that_is_passed_code_stays_eager() -> None:
    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
            result: Tensor = function(x)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0], None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Applied.apply(self.a(x), torch.sin)
            return result

    assert_like_eager(Model(), (torch.randn(2, 4),), eager_modules=("",))


class Normalised(nn.Module):
    """Weights that hooks compute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.weight_norm(nn.Linear(8, 8))
        self.b = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.c = nn.Linear(8, 8)
        prune.l1_unstructured(self.c, "weight", 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(rows, 8)``."""
        out: Tensor = self.c(self.b(self.a(x)))
        return out


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("training", [True, False])
def test_weights_that_known_hooks_compute_are_in_the_graph(training: bool) -> None:
    torch.manual_seed(0)
    model = Normalised().train(training)
    torch.manual_seed(0)
    twin = Normalised().train(training)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    for _ in range(3):
        x = torch.randn(5, 8)
        with autocast(torch.bfloat16):
            expected = twin(x)
        assert equal(amp(x), expected)
        for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert equal(ours, theirs), name
    assert amp.eager_modules == ()
    assert len(amp.graph_modules) == 1


def test_a_hook_of_the_user_makes_its_module_eager_beside_known_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    for _ in range(2):
        with autocast(torch.bfloat16):
            expected = twin(x)
        assert equal(amp(x), expected)
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert "0" in amp.eager_modules


def test_a_real_call_that_fails_in_the_middle_of_capture_leaves_no_trace() -> None:
    class Fails(torch.autograd.Function):
        """Fails where it runs for real, the first time."""

        failures = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if Fails.failures == 0 and type(x) is Tensor:
                Fails.failures = 1
                raise RuntimeError("out of luck")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(self.norm(self.a(x)))
            h = Fails.apply(h)
            result: Tensor = h if h.sum() > 1e9 else self.a(h)
            return result

    Fails.failures = 1
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    with autocast(torch.bfloat16):
        expected = twin(x)
    Fails.failures = 0
    torch.manual_seed(1)
    assert equal(fxamp.convert(model, dtype=torch.bfloat16)(x), expected)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert equal(ours, theirs)
