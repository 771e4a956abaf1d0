"""What runs under ``torch.utils.checkpoint`` is a block of the graph: recomputed, and as small in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.live_bytes import LiveBytes
from tests.models import assert_like_eager, autocast

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


class Block(nn.Module):
    """Attention and a feed-forward net, pre-norm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Of states ``(batch, length, width)``, new ones."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.drop(self.proj(attended.transpose(1, 2).reshape(batch, length, width)))
        down: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class Checkpointed(nn.Module):
    """Blocks of which each is checkpointed."""

    def __init__(self, *, blocks: int = 2, width: int = 16, reentrant: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(blocks))
        self.head = nn.Linear(width, width)
        self.options: dict[str, Any] = {"use_reentrant": reentrant, **options}

    def forward(self, x: Tensor) -> Tensor:
        """States ``(batch, length, width)`` of states."""
        x = self.head(x)
        for block in self.blocks:
            result = checkpoint(block, x, **self.options)
            assert isinstance(result, Tensor)
            x = result
        out: Tensor = self.head(x)
        return out


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpointed_model_is_eager_autocast(reentrant: bool, dtype: torch.dtype) -> None:
    assert_like_eager(Checkpointed(reentrant=reentrant), (torch.randn(2, 3, 16),), dtype=dtype)


@KINDS
def test_an_input_gets_its_gradient_through_checkpoints(reentrant: bool) -> None:
    assert_like_eager(Checkpointed(reentrant=reentrant), (torch.randn(2, 3, 16, requires_grad=True),))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@KINDS
def test_evaluation_without_gradients_has_no_block(reentrant: bool) -> None:
    with torch.no_grad():
        amp = assert_like_eager(Checkpointed(reentrant=reentrant).eval(), (torch.randn(2, 3, 16),))
    assert "checkpointed" not in str(amp.graph_module.graph)


@KINDS
def test_the_random_state_is_not_kept_where_the_model_says_so(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant, preserve_rng_state=False)
    assert_like_eager(model, (torch.randn(2, 3, 16),))


@KINDS
def test_weights_and_closures_are_shared_with_the_code_around(reentrant: bool) -> None:
    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.a(x)

            def block(h: Tensor, scale: float) -> tuple[Tensor, Tensor, int]:
                return self.norm(self.a(h)) * gate.detach() * scale * h.shape[0], h.mean(), 3

            h, mean, count = checkpoint(block, self.a(x), 0.5, use_reentrant=reentrant)
            result: Tensor = self.a(h) + mean * count
            return result

    amp = assert_like_eager(Closing(), (torch.randn(5, 8),))
    for batch in (3, 7):
        amp(torch.randn(batch, 8))
    assert len([1 for module in amp.graph_modules if module is amp.graph_module]) == 1


def test_a_checkpoint_inside_a_checkpoint() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a = Checkpointed(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            result = checkpoint(self.inner, self.a(x), use_reentrant=False)
            assert isinstance(result, Tensor)
            return result

    assert_like_eager(Nested(), (torch.randn(2, 3, 16),))


def test_a_checkpoint_around_the_converted_model() -> None:
    def around(model: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: checkpoint(model, x, use_reentrant=False)

    model = Checkpointed()
    twin = copy.deepcopy(model)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 16)
    for _ in range(2):
        torch.manual_seed(0)
        around(amp)(x).float().sum().backward()
        torch.manual_seed(0)
        with autocast(torch.bfloat16):
            out = around(twin)(x)
        out.float().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_the_graph_itself_runs_with_its_blocks() -> None:
    model = Checkpointed().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 16)
    expected = amp(x)
    assert torch.equal(amp.graph_module(x)[0], expected)


@KINDS
def test_a_step_of_12_checkpointed_blocks_takes_no_more_memory_than_in_eager(reentrant: bool) -> None:
    model, x = Checkpointed(blocks=12, width=64, reentrant=reentrant), torch.randn(4, 32, 64)
    amp = fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16)

    def peak(call: Callable[..., Any], scope: Any) -> int:
        for parameter in (*model.parameters(), *amp.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as live:
            with scope:
                out = call(x)
            out.float().square().sum().backward()
        return int(live.peak)

    amp(x)
    plain = peak(_unchecked(model), autocast(torch.bfloat16))
    eager, ours = peak(model, autocast(torch.bfloat16)), peak(amp, nullcontext())
    assert ours <= 1.02 * eager
    assert eager < 0.6 * plain, "the checkpoints save nothing, so nothing is measured"


def _unchecked(model: Checkpointed) -> Callable[..., Any]:
    def run(x: Tensor) -> Tensor:
        x = model.head(x)
        for block in model.blocks:
            x = block(x)
        out: Tensor = model.head(x)
        return out

    return run
