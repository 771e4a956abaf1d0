"""A frozen module with packed weights: used where proven, told where not; the plain ones stay as they are.

No CPU kernels for low precision are needed: here the weight is packed in float32, and multiplied as the plain
call does it, so the bits are the same.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.runtime.packed_linear import Proven
from fxamp.runtime.prepack import Packing
from tests.models import autocast, equal

BF16 = torch.bfloat16
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
pytestmark = needs_onednn

LINEARS: list[int] = []
"""The rows of each call that has read a packed weight."""


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.float(), rows)
    return packed


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    LINEARS.append(x.numel() // x.shape[-1])
    return functional.linear(x, packed.to_dense().to(x.dtype), bias)


def _other_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, packed, bias) + (x.shape[0] == 3)


def _faster(plain: Any, other: Any) -> float:
    return 0.5


def _slower(plain: Any, other: Any) -> float:
    return 1.5


HERE = Packing(smallest=64, pack=_pack, linear=_linear, ratio=_faster)


@pytest.fixture(autouse=True)
def _none_so_far() -> None:
    LINEARS.clear()


class Net(nn.Module):
    """Linear layers in the forms that models write, one of them small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.small = nn.Linear(16, 2)
        self.product = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """*x*: ``(*, 16)``."""
        h = functional.gelu(self.first(x))
        h = self.second(h) @ self.product
        out: Tensor = self.small(h)
        return out


def _frozen(packing: Packing | str = HERE, model: nn.Module | None = None, *args: Any) -> tuple[Any, Any]:
    model = (Net() if model is None else model).eval()
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), args or (torch.ones(2, 16),), prepack=packing)
    return model, frozen


def _expected(model: nn.Module, *args: Any) -> Tensor:
    with torch.no_grad(), autocast(BF16):
        result: Tensor = model(*args)
    return result


def _told(frozen: Any) -> list[str]:
    return sorted(map(str, frozen.prepacked))


# --- what is packed ---------------------------------------------------------------------------------


def test_a_proven_call_reads_packed_weights_and_gives_the_same_bits() -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    LINEARS.clear()
    assert equal(frozen(x), _expected(model, x))
    assert LINEARS == [2, 2, 2]
    assert _told(frozen) == [
        "first.weight: bf16[32, 16], input [2, 16]: packed, the same bits in 0.50 of the plain time",
        "product: bf16[16, 16], input [2, 16]: packed, the same bits in 0.50 of the plain time",
        "second.weight: bf16[16, 32], input [2, 32]: packed, the same bits in 0.50 of the plain time",
        "small.weight: bf16[2, 16], any input: plain, it has fewer than 64 elements",
    ]


def test_nothing_is_packed_unless_it_is_asked_for() -> None:
    _, frozen = _frozen("off")
    frozen(torch.ones(2, 16))
    assert frozen.prepacked == ()
    assert "packed" not in repr(frozen)
    assert {program.packed for program in frozen._runner.all_programs()} == {None}


def test_the_bytes_of_packed_copies_are_told() -> None:
    _, frozen = _frozen()
    assert "packed beside them: 0 bytes" in repr(frozen)
    assert [row.why for row in frozen.prepacked if row.call is None][1:] == ["no call so far"] * 3
    frozen(torch.ones(2, 16))
    assert f"packed beside them: {4 * (2 * 16 * 32 + 16 * 16):,} bytes" in repr(frozen)  # in float32, here


def test_each_number_of_rows_has_its_layout_and_there_are_few() -> None:
    model, frozen = _frozen()
    for rows in (1, 2, 3, 1, 2, 3):
        x = torch.randn(rows, 16)
        assert equal(frozen(x), _expected(model, x))
    assert {row.why for row in frozen.prepacked if row.call and row.call[0] == 3} == {
        "it is packed for 2 numbers of rows already"
    }
    assert 3 not in LINEARS


def test_few_kinds_of_calls_are_tried() -> None:
    model, frozen = _frozen(replace(HERE, kinds=2, layouts=9))
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows, 16)
        assert equal(frozen(x), _expected(model, x))
    assert {row.call[0] for row in frozen.prepacked if row.call} == {1, 2}


def test_calls_of_other_sizes_with_as_many_rows_share_a_layout() -> None:
    model, frozen = _frozen(replace(HERE, layouts=1))
    for shape in ((6, 16), (2, 3, 16)):
        x = torch.randn(shape)
        assert equal(frozen(x), _expected(model, x))
    assert {row.packed for row in frozen.prepacked if row.call} == {True}


@pytest.mark.parametrize(
    ("packing", "why"),
    [
        (replace(HERE, ratio=_slower), "the same bits but no gain: 1.50 of the plain time"),
        (replace(HERE, linear=_other_linear), "other bits for the input of the call"),
    ],
    ids=["no gain", "other bits"],
)
def test_without_a_proof_the_plain_path_stays_and_nothing_is_kept(packing: Packing, why: str) -> None:
    model, frozen = _frozen(packing)
    x = torch.randn(3, 16)
    for _ in range(2):
        assert equal(frozen(x), _expected(model, x))
    assert {row.why for row in frozen.prepacked if row.call} == {why}
    assert "packed beside them: 0 bytes" in repr(frozen)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_auto_follows_the_cpu(dtype: torch.dtype) -> None:
    """Where oneDNN has no kernels, the flat code is the plain one."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    x = torch.randn(1, 256)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=dtype), (x,), prepack="auto")
    with torch.no_grad(), autocast(dtype):
        expected = model(x)
    for _ in range(2):
        assert equal(frozen(x), expected)
    why = Packing().refusal(dtype)
    if why:
        assert {row.why for row in frozen.prepacked} == {why}
        assert {program.packed for program in frozen._runner.all_programs()} == {None}
    else:
        assert all(row.call is not None for row in frozen.prepacked)


# --- forms ------------------------------------------------------------------------------------------


class Written(nn.Module):
    """One product, written in some way."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.write(x, self.weight, self.bias)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "linear": (functional.linear, True),
    "linear without bias": (lambda x, w, b: functional.linear(x, w) + b, True),
    "linear by the transpose": (lambda x, w, b: functional.linear(x, w.t(), b), True),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), True),
    "addmm by the transpose": (lambda x, w, b: torch.addmm(b, x, w.t()), True),
    "mm": (lambda x, w, b: torch.mm(x, w), True),
    "matmul": (lambda x, w, b: x @ w.T, True),
    "addmm with a factor": (lambda x, w, b: torch.addmm(b, x, w, alpha=2), False),
    "a bias that is computed": (lambda x, w, b: functional.linear(x, w, b * x.sum()), False),
    "the weight on the left": (lambda x, w, b: torch.mm(w, x.t()), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_a_weight_are_found_in_all_their_forms(name: str) -> None:
    write, is_found = PRODUCTS[name]
    model, frozen = _frozen(HERE, Written(write))
    x = torch.randn(2, 16)
    for _ in range(2):
        assert equal(frozen(x), _expected(model, x))
    assert len([row for row in frozen.prepacked if row.call]) == is_found


def test_an_input_at_an_odd_address_takes_the_plain_path() -> None:
    model, frozen = _frozen(HERE, Written(functional.linear))
    flat = torch.randn(40).to(BF16)
    for x in (flat[:32].view(2, 16), flat[1:33].view(2, 16)):
        frozen(x)
        LINEARS.clear()
        assert equal(frozen(x), _expected(model, x))
        assert bool(LINEARS) is (x.data_ptr() % 64 == 0)


# --- weights that change ----------------------------------------------------------------------------


def test_loaded_weights_are_packed_and_proven_anew() -> None:
    _, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    frozen.load_state_dict(model.state_dict())
    assert "packed beside them: 0 bytes" in repr(frozen)
    for _ in range(2):
        LINEARS.clear()
        assert equal(frozen(x), _expected(model, x))
    assert LINEARS == [2, 2, 2]


def test_a_weight_that_is_written_to_is_packed_anew() -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    with torch.no_grad():
        dict(frozen.named_parameters())["second.weight"].mul_(2)
        model.get_parameter("second.weight").mul_(2)
    assert equal(frozen(x), _expected(model, x))


# --- the plain weights ------------------------------------------------------------------------------


def _pickled(frozen: Any) -> Any:
    return pickle.loads(pickle.dumps(frozen))


def _saved(frozen: Any) -> Any:
    file = io.BytesIO()
    torch.save(frozen, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _moved(frozen: Any) -> Any:
    return copy.deepcopy(frozen)._apply(lambda tensor: tensor.clone())


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved, _moved])
def test_a_copy_packs_for_itself(copied: Callable[[Any], Any]) -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    other = copied(frozen)
    assert "packed beside them: 0 bytes" in repr(other)
    for _ in range(2):
        LINEARS.clear()
        assert equal(other(x), _expected(model, x))
    assert LINEARS == [2, 2, 2]


def test_the_state_dict_and_the_graph_have_the_plain_weights() -> None:
    _, plain = _frozen("off")
    _, frozen = _frozen()
    frozen(torch.ones(2, 16))
    pairs = zip(plain.state_dict().items(), frozen.state_dict().items(), strict=True)
    assert all(name == other and equal(one, two) for (name, one), (other, two) in pairs)
    assert str(frozen.graph_module.graph) == str(plain.graph_module.graph)
    LINEARS.clear()
    frozen.graph_module(torch.ones(2, 16))
    assert LINEARS == []


def test_torch_compile_takes_the_plain_weights() -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    LINEARS.clear()
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(frozen, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert equal(compiled(x), _expected(model, x))
    assert LINEARS == []


# --- calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_packed_weights_serve_every_mode(mode: Callable[[], Any]) -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    with mode():
        for _ in range(2):
            LINEARS.clear()
            out = frozen(x)
    assert LINEARS == [2, 2, 2]
    assert equal(out, _expected(model, x))
    with torch.no_grad():
        assert equal(frozen(x), _expected(model, x))


def test_another_number_of_threads_is_another_kind_of_call() -> None:
    _, frozen = _frozen(HERE, Written(functional.linear))
    x, before = torch.ones(2, 16), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            frozen(x)
    finally:
        torch.set_num_threads(before)
    assert len(frozen.prepacked) == 2


def test_threads_that_call_at_once_get_the_same_bits() -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    found: list[Tensor] = []

    def call() -> None:
        found.extend(frozen(x) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = _expected(model, x)
    assert len(found) == 80
    assert all(equal(one, expected) for one in found)
    assert sum(row.packed for row in frozen.prepacked) == 3


class Sees(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.name() in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


def test_no_proof_is_made_while_somebody_looks_on() -> None:
    _, frozen = _frozen(HERE)
    frozen._runner.capture((torch.ones(2, 16),), {}, frozen._region)
    with Sees() as seen:
        frozen(torch.ones(2, 16))
    assert seen.products == 4
    assert all(row.call is None for row in frozen.prepacked)


def test_vmap_takes_the_plain_path() -> None:
    _, plain = _frozen("off", Written(functional.linear))
    _, frozen = _frozen(HERE, Written(functional.linear))
    x = torch.randn(4, 2, 16)
    frozen(x[0])
    LINEARS.clear()
    found, expected = (torch.vmap(lambda one, module=module: module(one))(x) for module in (frozen, plain))
    assert LINEARS == []
    assert equal(found, expected)


def test_an_export_has_the_plain_weights(tmp_path: Path) -> None:
    model, frozen = _frozen()
    x = torch.randn(2, 16)
    frozen(x)
    LINEARS.clear()
    fxamp.export(frozen, (x,), tmp_path / "model.pt2", check=False)
    program = torch.export.load(tmp_path / "model.pt2")
    assert {value.layout for value in program.state_dict.values()} == {torch.strided}
    assert equal(program.module()(x), _expected(model, x))
    assert LINEARS == []


# --- kinds of calls ---------------------------------------------------------------------------------


class Caches(nn.Module):
    """Projects a token, and joins it to those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """*x*: ``(batch, 1, 16)``, *before*: ``(batch, length, 16)``."""
        return torch.cat([before, self.project(x)], 1)


def test_a_size_that_no_linear_layer_sees_makes_no_kind_of_call() -> None:
    model, frozen = _frozen(HERE, Caches(), torch.randn(2, 1, 16), torch.randn(2, 3, 16))
    for length in range(2, 30):
        x, before = torch.randn(2, 1, 16), torch.randn(2, length, 16)
        LINEARS.clear()
        assert equal(frozen(x, before), _expected(model, x, before))
    assert LINEARS == [2]
    assert len(frozen.prepacked) == 1


def test_where_nothing_is_proven_the_code_is_the_plain_one() -> None:
    _, frozen = _frozen(replace(HERE, ratio=_slower))
    x = torch.randn(2, 16)
    frozen(x), frozen(x)
    (program,) = frozen._runner.all_programs()
    assert program.packed.choose([x]) is program.code


class Selects(nn.Module):
    """Projects the rows that a condition on values selects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """*x*: ``(rows, 16)``."""
        return torch.as_tensor(self.project(x[x[:, 0] > 0]))


def test_sizes_that_depend_on_values_give_the_same_bits_all_the_same() -> None:
    model, frozen = _frozen(HERE, Selects(), torch.randn(8, 16))
    for seed in range(6):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        assert equal(frozen(x), _expected(model, x))


def test_a_proof_holds_for_the_sizes_strides_and_addresses_that_it_was_made_for() -> None:
    _, frozen = _frozen(HERE, Written(functional.linear))
    x = torch.randn(2, 16)
    frozen(x), frozen(x)
    (program,) = frozen._runner.all_programs()
    scope = program.packed.choose([x]).run.__globals__
    (proven,) = [value for value in scope.values() if isinstance(value, Proven)]
    weight, bias = (value for _, value in sorted(frozen.state_dict().items(), reverse=True))
    others = [
        torch.randn(3, 16).to(BF16),
        torch.randn(16, 2).to(BF16).t(),
        torch.randn(40).to(BF16)[1:33].view(2, 16),
    ]
    for one, rows in [(x.to(BF16), [2]), *((other, []) for other in others)]:
        LINEARS.clear()
        assert equal(proven(one, weight, bias), functional.linear(one, weight, bias))
        assert rows == LINEARS
