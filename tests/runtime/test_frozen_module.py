"""A frozen module is an ``nn.Module`` to be saved, loaded, copied and moved, and refuses to be trained."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import FrozenError
from tests.models import SmallCNN, autocast

BF16 = torch.bfloat16


class Tied(nn.Module):
    """An embedding and a head with the same weight, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 10)`` of *tokens*."""
        logits: Tensor = self.head(self.norm(self.body(self.embed(tokens) * 0.5))) * self.scale
        return logits


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 9]])


def _frozen(seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Tied().eval()
    return model, fxamp.freeze(fxamp.convert(model, dtype=BF16), (TOKENS,))


def _expected(model: nn.Module, *args: Any) -> Tensor:
    with torch.no_grad(), autocast(BF16):
        result: Tensor = model(*args)
    return result


def _found(frozen: Any, *args: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = frozen(*args)
    return result


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [lambda frozen: frozen.train(), lambda frozen: frozen.requires_grad_()])
def test_it_refuses_to_be_trained(ask: Callable[[Any], object]) -> None:
    _, frozen = _frozen()
    with pytest.raises(FrozenError, match=r"cannot be trained\n  train the model it was made from"):
        ask(frozen)
    assert frozen.eval() is frozen.requires_grad_(requires_grad=False) is frozen
    assert not frozen.training


def test_an_input_that_requires_grad_is_refused_where_gradients_are_recorded() -> None:
    frozen = fxamp.freeze(fxamp.convert(nn.Linear(4, 2), dtype=BF16), (torch.ones(1, 4),))
    x = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(FrozenError, match=r"records no gradients\n  call it under torch.no_grad"):
        frozen(x)
    assert not _found(frozen, x).requires_grad


def test_without_no_grad_a_call_records_nothing_all_the_same() -> None:
    model, frozen = _frozen()
    out = frozen(TOKENS)
    assert not out.requires_grad
    assert torch.equal(out, _expected(model, TOKENS))
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


# --- what is stored ---------------------------------------------------------------------------------


def test_the_state_dict_has_the_names_of_the_model_and_the_dtypes_that_are_stored() -> None:
    model, frozen = _frozen()
    state = frozen.state_dict()
    assert list(state) == list(model.state_dict())
    assert {name: value.dtype for name, value in state.items()} == {
        "scale": torch.float32,
        "embed.weight": torch.float32,
        "body.weight": BF16,
        "body.bias": BF16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
        "head.weight": torch.float32,
    }
    assert {type(value) for value in state.values()} == {Tensor}
    assert dict(frozen.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert [name for name, _ in frozen.named_buffers()] == ["scale"]


def test_the_state_dict_of_a_frozen_module_goes_into_another() -> None:
    model, one = _frozen(0)
    _, other = _frozen(1)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    assert (
        str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    )
    assert torch.equal(_found(other, TOKENS), _expected(model, TOKENS))


def test_a_float32_state_dict_is_rounded_as_it_is_loaded_and_the_log_says_so(caplog: Any) -> None:
    model, _ = _frozen(0)
    _, other = _frozen(1)
    with caplog.at_level("INFO", logger="fxamp"):
        other.load_state_dict(model.state_dict())
    assert "load_state_dict rounded 2 weights to torch.bfloat16" in caplog.text
    assert torch.equal(_found(other, TOKENS), _expected(model, TOKENS))
    assert torch.equal(other.state_dict()["body.weight"], model.state_dict()["body.weight"].to(BF16))


def test_a_weight_that_is_needed_in_float32_is_not_loaded_from_less() -> None:
    _, frozen = _frozen()
    state = {name: value.to(BF16) for name, value in frozen.state_dict().items()}
    with pytest.raises(
        FrozenError, match=r"'scale' is needed in torch.float32.*bfloat16\n  load the float32"
    ):
        frozen.load_state_dict(state)


def test_loading_refuses_assign_and_names_that_do_not_fit() -> None:
    _, frozen = _frozen()
    with pytest.raises(FrozenError, match="leave assign=True out"):
        frozen.load_state_dict(frozen.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        frozen.load_state_dict({**frozen.state_dict(), "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        frozen.load_state_dict({**frozen.state_dict(), "body.bias": torch.ones(5)})


def test_it_is_saved_and_loaded_as_a_part_of_another_module() -> None:
    model, one = _frozen(0)
    _, other = _frozen(1)
    first, second = nn.ModuleDict({"part": one}), nn.ModuleDict({"part": other})
    state = first.state_dict()
    assert state["part.body.weight"].dtype is BF16
    second.load_state_dict(state)
    assert torch.equal(_found(other, TOKENS), _expected(model, TOKENS))
    del state["part.norm.bias"]
    assert second.load_state_dict(state, strict=False).missing_keys == ["part.norm.bias"]


def test_a_float32_weight_that_is_written_to_is_rounded_anew() -> None:
    model, frozen = _frozen()
    _found(frozen, TOKENS)
    with torch.no_grad():
        dict(frozen.named_parameters())["embed.weight"].mul_(3)
        dict(frozen.named_parameters())["body.weight"].mul_(2)
        model.get_parameter("embed.weight").mul_(3)
        model.get_parameter("body.weight").mul_(2)
    assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))


# --- copies and moves -------------------------------------------------------------------------------


def _pickled(frozen: Any) -> Any:
    return pickle.loads(pickle.dumps(frozen))


def _saved(frozen: Any) -> Any:
    file = io.BytesIO()
    torch.save(frozen, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_gives_the_same_bits_and_shares_nothing(copied: Callable[[Any], Any]) -> None:
    model, frozen = _frozen()
    other = copied(frozen)
    assert torch.equal(_found(other, TOKENS), _expected(model, TOKENS))
    state = other.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in frozen.state_dict().items()
    }
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))


def test_a_move_to_where_it_is_changes_nothing() -> None:
    _, frozen = _frozen()
    before = dict(frozen.named_parameters())
    assert frozen.to("cpu") is frozen.cpu() is frozen
    assert all(after is before[name] for name, after in frozen.named_parameters())


def test_a_move_replaces_what_is_stored_and_the_next_call_captures_anew() -> None:
    model, frozen = _frozen()
    before = dict(frozen.named_parameters())
    frozen._apply(lambda tensor: tensor.clone())  # what a move to another device does
    assert all(after is not before[name] for name, after in frozen.named_parameters())
    assert dict(frozen.named_parameters())["body.weight"].dtype is BF16
    assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))
    state = frozen.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_a_move_to_the_meta_device_keeps_names_and_dtypes() -> None:
    _, frozen = _frozen()
    dtypes = {name: value.dtype for name, value in frozen.state_dict().items()}
    frozen.to("meta")
    assert {name: value.dtype for name, value in frozen.state_dict().items()} == dtypes
    assert {value.device.type for value in frozen.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    "change",
    [
        lambda frozen: frozen.half(),
        lambda frozen: frozen.float(),
        lambda frozen: frozen.double(),
        lambda frozen: frozen.bfloat16(),
        lambda frozen: frozen.to(torch.float32),
    ],
)
def test_another_dtype_is_refused_and_nothing_has_changed(change: Callable[[Any], object]) -> None:
    model, frozen = _frozen()
    with pytest.raises(FrozenError, match=r"keeps the dtypes it stores.*\n  to\(device\) is fine"):
        change(frozen)
    assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))


# --- calls ------------------------------------------------------------------------------------------


def test_a_region_around_a_call_has_no_influence() -> None:
    model, frozen = _frozen()
    for dtype in (torch.float16, BF16):
        with autocast(dtype):
            assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(_found(frozen, TOKENS), _expected(model, TOKENS))


def test_threads_that_never_entered_a_region_call_it() -> None:
    model = SmallCNN().eval()
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), (torch.randn(1, 3, 8, 8),))
    inputs = [torch.randn(rows, 3, 8, 8) for rows in (1, 2, 3, 4)]
    found: dict[int, Tensor] = {}

    def call(index: int) -> None:
        for _ in range(3):
            found[index] = frozen(inputs[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], _expected(model, x)) for index, x in enumerate(inputs))


def test_it_tells_what_was_decided() -> None:
    _, frozen = _frozen()
    _found(frozen, TOKENS)
    report = frozen.report()
    assert report.casts == (1,)  # of the embedding
    assert report.eager == ()
    assert frozen.eager_modules == ()
    assert frozen.graph_module in frozen.graph_modules
    assert torch.equal(frozen.graph_module(TOKENS)[0], _found(frozen, TOKENS))
    assert repr(frozen).startswith("FrozenModule(policy=Policy(cpu")


def test_its_modules_are_out_of_reach() -> None:
    _, frozen = _frozen()
    assert list(frozen.modules()) == [frozen]
    with pytest.raises(AttributeError):
        _ = frozen.body


class Checked(nn.Module):
    """It refuses some inputs by what it computes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, 4)`` from ``(rows, 4)``."""
        y: Tensor = self.layer(x)
        if y.sum() > 0:
            raise ValueError("the sum is positive")
        return y


def test_an_error_of_the_model_is_raised_although_the_weights_are_rounded() -> None:
    model, x = Checked(), torch.zeros(2, 4)
    nn.init.constant_(model.layer.weight, 1.0)
    nn.init.constant_(model.layer.bias, -1.0)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), (x,))
    assert frozen.state_dict()["layer.weight"].dtype is BF16
    for _ in range(2):
        with torch.no_grad(), autocast(BF16):
            expected = model(x)
        assert torch.equal(frozen(x), expected)
        with pytest.raises(ValueError, match="the sum is positive"):
            frozen(x + 1)
