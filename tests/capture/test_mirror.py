"""``forward`` runs on a copy: what it changes there is told, and the user's module stays as it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxamp.capture.mirror import Mirror
from fxamp.errors import CaptureError


class Model(nn.Module):
    """A module that does to itself what a test asks for."""

    cache: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.register_buffer("mean", torch.zeros(2))
        self.cache = torch.ones(2)
        self.step, self.seen = 0, [1]
        self.settings: dict[str, Any] = {"rate": 0.5, "sizes": [1, 2]}
        self.method = self.helper
        self.bound = functools.partial(self.helper, scale=2)
        self.change: Callable[[Model], None] = lambda model: None

    def helper(self, x: Tensor, scale: int = 1) -> Tensor:
        """Use a child, by way of a method that was stored on the module."""
        return self.layer(x) * scale  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Change the module, then use it."""
        self.change(self)
        return self.bound(self.method(x))


def _mirrored(change: Callable[[Model], None]) -> tuple[Model, Mirror]:
    model = Model()
    model.change = change
    mirror = Mirror(model, lambda path: None, lambda: None)
    mirror.root(torch.ones(1, 2))
    return model, mirror


def _state(model: nn.Module) -> Any:
    attributes = {
        key: value for key, value in vars(model).items() if key not in ("method", "bound", "change")
    }
    return {key: copy.copy(value) for key, value in attributes.items()}


def _assign(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, name, value)


def test_the_copy_shares_the_tensors_and_no_module() -> None:
    model, mirror = _mirrored(lambda model: None)
    assert list(map(id, mirror.root.parameters())) == list(map(id, model.parameters()))
    assert not set(map(id, mirror.root.modules())) & set(map(id, model.modules()))
    assert mirror.rebindings() == []


def test_stored_methods_of_the_copy_reach_the_copy() -> None:
    _, mirror = _mirrored(lambda model: None)
    assert mirror.root.method.__self__ is mirror.root  # type: ignore[union-attr]
    assert mirror.root.bound.func.__self__ is mirror.root  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        _assign("step", 1),
        _assign("mean", torch.ones(2)),
        _assign("fresh", torch.ones(2)),
        _assign("layer", nn.Linear(2, 2)),
        lambda model: model.settings["sizes"].append(3),
        lambda model: model.seen.append(2),
        lambda model: model.layers.append(nn.ReLU()),
        lambda model: delattr(model, "cache"),
    ],
)
def test_the_users_module_never_changes(change: Callable[[Model], None]) -> None:
    model = Model()
    model.change = change
    before, inner = _state(model), copy.deepcopy(model.settings)
    Mirror(model, lambda path: None, lambda: None).root(torch.ones(1, 2))
    after = _state(model)
    assert before.keys() == after.keys()
    assert model.settings == inner
    assert all(before[key] is after[key] or before[key] == after[key] for key in before.keys() - {"cache"})
    assert len(model.layers) == 1


def test_a_buffer_that_is_rebound_is_told_with_its_place() -> None:
    new = torch.ones(2)
    _, mirror = _mirrored(_assign("mean", new))
    (rebinding,) = mirror.rebindings()
    assert rebinding.tensor is new
    assert (rebinding.place.path, rebinding.place.kind, rebinding.place.name) == ("", "_buffers", "mean")


def test_a_plain_tensor_attribute_may_be_rebound_or_new() -> None:
    new = torch.ones(2)

    def change(model: Model) -> None:
        model.cache = new
        model.layer.last = new

    _, mirror = _mirrored(change)
    assert sorted(rebinding.place.qualified for rebinding in mirror.rebindings()) == ["cache", "layer.last"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_assign("step", 1), "step"),
        (_assign("fresh", 1), "fresh"),
        (_assign("layer", nn.Linear(2, 2)), "layer"),
        (lambda model: model.settings["sizes"].append(3), "settings"),
        (lambda model: model.seen.append(2), "seen"),
        (lambda model: delattr(model, "cache"), "cache"),
        (lambda model: model.layer.train(mode=False), "layer.training"),
    ],
)
def test_another_attribute_that_changes_cannot_be_replayed(
    change: Callable[[Model], None], name: str
) -> None:
    _, mirror = _mirrored(change)
    with pytest.raises(CaptureError, match=f"forward .* the attribute '{name}'"):
        mirror.rebindings()


def test_it_tells_which_modules_forward_is_running() -> None:
    entered: list[str] = []
    mirror = Mirror(Model(), entered.append, lambda: entered.append("left"))
    mirror.root(torch.ones(1, 2))
    assert entered == ["", "layer", "left", "layer", "left", "left"]


def test_it_tells_that_a_forward_ended_by_an_error() -> None:
    model, ended = Model(), []
    mirror = Mirror(model, lambda path: None, lambda: ended.append(1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        mirror.root(torch.ones(1, 5))
    assert len(ended) == 2
    assert model.forward.__func__ is Model.forward  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_has_no_python_to_run() -> None:
    model = Model()
    model.layers.append(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(CaptureError, match=r"module 'layers\.1' is .* no Python to (run|record)"):
        Mirror(model, lambda path: None, lambda: None)
