"""A converted graph calls what eager CUDA autocast calls on CUDA, with the same dtypes; no GPU needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.fake_cuda import CUDNN_ONLY, Comparison, compare, has_cuda_build
from tests.models import SmallCNN, SmallTransformer
from tests.zoo.entry import Entry, entries

pytestmark = pytest.mark.skipif(not has_cuda_build(), reason="this torch is built without CUDA")

LOW = [torch.float16, torch.bfloat16]


def assert_same(found: Comparison) -> None:
    assert found.skipped == ""
    assert found.difference == ""
    assert found.operators > 0


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("cls", [SmallCNN, SmallTransformer])
def test_a_small_model_calls_the_same_operators(
    cls: type[nn.Module], training: bool, low: torch.dtype
) -> None:
    args = (torch.randn(2, 3, 8, 8),) if cls is SmallCNN else (torch.randint(0, 30, (2, 5)),)
    with torch.set_grad_enabled(training):
        assert_same(compare(cls().train(training), args, {}, low))


def test_a_missing_cast_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxamp.passes.insert_casts import InsertCasts  # noqa: PLC0415

    monkeypatch.setattr(InsertCasts, "run", lambda self, graph: False)
    monkeypatch.setattr("fxamp.passes.verify.Verify.run", lambda self, graph: False)
    found = compare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (torch.ones(2, 4),), {}, torch.float16)
    assert found.difference


def test_what_matmul_does_hangs_on_whether_a_weight_requires_grad_also_without_gradients() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x.transpose(0, 1), self.weight)

    with torch.no_grad():
        assert_same(compare(Transposed(), (torch.randn(3, 2, 4),), {}, torch.float16))


@pytest.mark.parametrize("name", sorted(CUDNN_ONLY))
def test_what_only_cudnn_runs_cannot_be_compared_here(name: str) -> None:
    found = compare(getattr(nn, name)(4, 4), (torch.randn(3, 2, 4),), {}, torch.float16)
    assert found.skipped or torch.cuda.is_available()


def _sweep(listed: tuple[Entry, ...], low: torch.dtype, count: Callable[[object], None]) -> None:
    compared = operators = casts = less = 0
    wrong, skipped = [], []
    for entry in listed:
        for mode in entry.modes:
            torch.manual_seed(0)
            args, kwargs = entry.inputs(mode == "train")
            model = entry.build().train(mode == "train")
            with torch.set_grad_enabled(mode == "train"):
                found = compare(model, args, kwargs, low)
            if found.skipped:
                skipped.append(f"{entry.name} {mode}: {found.skipped}")
                continue
            compared += 1
            operators += found.operators
            casts, less = casts + found.casts[0], less + found.casts[0] - found.casts[1]
            if found.difference:
                wrong.append(f"{entry.name} {mode}: {found.difference}")
    count(f"{compared} runs, {operators} operators, {casts} casts, {less} fewer; {len(skipped)} skipped")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("library", ["nn", "torchvision", "timm", "transformers", "diffusers"])
def test_the_zoo_calls_the_same_operators(
    library: str, low: torch.dtype, count: Callable[[object], None]
) -> None:
    try:
        listed = entries(library)
    except ImportError as error:
        pytest.skip(f"{library} is not installed: {error}")
    _sweep(listed, low, count)
