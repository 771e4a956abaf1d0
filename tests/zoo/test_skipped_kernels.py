"""A quick count is the real one, or it is not made: nothing that was skipped is ever read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.casts import CastCounts, count_casts, try_to_count
from tests.zoo.entry import LIBRARIES, Entry, entries
from tests.zoo.skipped_kernels import ReadError, UnreadValues, skipped_kernels

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "tolist": lambda x: x.float().tolist(),
    "numpy": lambda x: x.float().numpy(),
    "nonzero": torch.nonzero,
    "masked": lambda x: x[x > 0],
    "unique": lambda x: x.float().unique(),
    "repeat": lambda x: torch.ones(64).repeat_interleave(x[:, 0].long()),
    "view": lambda x: x.t()[3, 2].item(),
    "in place": lambda x: torch.zeros(64, 64).add_(x)[0, 0].item(),
    "out": lambda x: _into(x).tolist(),
    "running mean": lambda x: _running_mean(x).sum().item(),
    "index put": lambda x: torch.zeros(64, 64).index_put((x > 0,), torch.tensor(1.0)),
    "sparse": lambda x: x.to_sparse(),
}


def _into(x: Tensor) -> Tensor:
    out = torch.empty(64, 64)
    torch.add(x.float(), 1, out=out)
    return out


def _running_mean(x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(64).train()
    norm(x)
    assert norm.running_mean is not None
    return norm.running_mean


def _low(*sizes: int) -> Tensor:
    return torch.ones(*sizes, dtype=torch.bfloat16)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: a @ b,
    "bmm": lambda a, b: a[None] @ b[None],
    "addmm": lambda a, b: nn.functional.linear(a, b, b[0]),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "convolution": lambda a, b: nn.functional.conv1d(a[None], b[:, :, None]),
    "transposed convolution": lambda a, b: nn.functional.conv_transpose1d(a[None], b[:, :, None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_large_products_in_low_precision_are_zeros(name: str) -> None:
    product = PRODUCTS[name]
    expected = product(_low(64, 64), _low(64, 64))
    with skipped_kernels() as skipped:
        found = product(_low(64, 64), _low(64, 64))
        assert (skipped.kernels, found.any().item()) == (1, False)
        assert (found.shape, found.dtype, found.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
        assert product(_low(8, 8), _low(8, 8)).all()
        assert product(torch.ones(64, 64), torch.ones(64, 64)).all()
        assert skipped.kernels == 1
    assert torch.equal(product(_low(64, 64), _low(64, 64)), expected)


@pytest.mark.parametrize("name", READS)
def test_what_is_made_of_what_was_skipped_is_not_read(name: str) -> None:
    given = torch.ones(64, 64, dtype=torch.bfloat16)
    with skipped_kernels() as skipped, UnreadValues(skipped):
        READS[name](given)
        product = given @ given
        with pytest.raises(ReadError):
            READS[name](product)
        READS[name](given)


def test_what_a_kernel_skips_inside_is_followed_too() -> None:
    given = torch.ones(1, 64, 64, dtype=torch.bfloat16)
    attention = nn.MultiheadAttention(64, 1, batch_first=True).bfloat16().eval()
    with torch.no_grad(), skipped_kernels() as skipped, UnreadValues(skipped):
        result, _ = attention(given, given, given)
        assert skipped.kernels
        with pytest.raises(ReadError):
            result.sum().item()


def test_all_is_as_it_was_afterwards() -> None:
    given = torch.ones(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ZeroDivisionError), skipped_kernels() as skipped, UnreadValues(skipped):
        raise ZeroDivisionError
    assert (given @ given).float().tolist() == [[64.0] * 64] * 64
    assert "tolist" not in vars(Tensor)


class Gate(nn.Module):
    """Reads what its first layer gives, and goes on by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like *x*, ``[64, 64]``."""
        x = self.first(x)
        return self.second(x) if x.any() else x


def test_a_model_that_reads_them_is_counted_in_real_calls() -> None:
    entry = Entry("gate", "nn", Gate, lambda _: ((torch.ones(64, 64),), {}))
    counts = try_to_count(entry, "eval")
    assert "ReadError" in counts.real
    assert (counts.status, counts.skipped, counts.eager, counts.eager_weights) == ("counted", 0, 5, 4)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("library", ["nn", "torchvision", "timm", "transformers"])
@pytest.mark.filterwarnings("ignore")
def test_the_quick_count_is_the_real_one(library: str, mode: str) -> None:
    pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed")
    for entry in entries(library):
        if entry.fast and mode in entry.modes:
            quick, real = CastCounts(library, entry.name, mode), CastCounts(library, entry.name, mode)
            count_casts(entry, mode, quick)
            count_casts(entry, mode, real, quick=False)
            assert replace(quick, skipped=0) == real
