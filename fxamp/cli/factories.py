"""From a word on the command line to a model.

=========================  =========================================================================
``torchvision:resnet18``   ``torchvision.models.get_model("resnet18", weights=None)``, with an image
``timm:vit_tiny_patch16_224``  ``timm.create_model(...)``, with an image of its size
``package.module:name``    what ``name()`` gives; a module that is there already is taken as it is
``path/to/file.py:name``   likewise
=========================  =========================================================================

A factory of one's own gives a model, or a pair of a model and its inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["Made", "UsageError", "load", "make"]

_IMAGE = (3, 224, 224)


class UsageError(Exception):
    """The command was given something that does not work; the message says what does."""


@dataclass(frozen=True)
class Made:
    """What a factory has made.

    Attributes:
        model: A module or a function.
        inputs: What to call it with, as for :func:`fxamp.compare`; ``None`` if the factory does not say.
    """

    model: nn.Module | Callable[..., Any]
    inputs: Any = None


def make(name: str, *, train: bool = False, seed: int = 0) -> Made:
    """The model that *name* stands for.

    Args:
        name: ``source:name``.
        train: Whether it is put in training mode; else in evaluation mode.
        seed: The seed of torch's generator before the factory is called.

    Raises:
        UsageError: There is no such factory, or it makes no model.
    """
    torch.manual_seed(seed)
    source, _, target = name.rpartition(":")
    known = {"torchvision": _torchvision, "timm": _timm}
    made = known[source](target) if source in known and target else _own(name)
    if isinstance(made.model, nn.Module):
        made.model.train(train)
    return made


def load(name: str) -> Any:
    """The object that ``package.module:name`` or ``path/to/file.py:name`` stands for.

    Raises:
        UsageError: There is no such thing.
    """
    source, _, target = name.rpartition(":")
    if not source or not target:
        raise UsageError(
            f"{name!r} is no factory\n  write  package.module:callable,  path/to/file.py:callable,  "
            "torchvision:resnet18  or  timm:NAME"
        )
    module = _from_file(source) if source.endswith(".py") else _from_package(source)
    found = module
    for part in target.split("."):
        if not hasattr(found, part):
            public = [
                key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
            ]
            raise UsageError(
                f"{source} has no {target!r}\n  it has:  {', '.join(public) or 'nothing callable'}"
            )
        found = getattr(found, part)
    return found


def _own(name: str) -> Made:
    found: Any = load(name)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise UsageError(
                f"{name} is of class {type(found).__name__}\n  name a function that gives the model"
            )
        found = found()
    model, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not callable(model):
        raise UsageError(
            f"{name}() gives a {type(model).__name__}\n  let it return a model, or  (model, inputs)"
        )
    return Made(model, inputs)


def _from_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UsageError(
            f"there is no module {name!r} on the path, which begins with {Path.cwd()}\n"
            "  a file is named with its ending:  path/to/file.py:callable"
        ) from error


def _torchvision(name: str) -> Made:
    models = _extra("torchvision.models", "torchvision")
    if name not in models.list_models():
        raise UsageError(
            f"torchvision has no model {name!r}\n  it has, among others:  {_like(name, models.list_models())}"
        )
    size = (3, 299, 299) if name == "inception_v3" else _IMAGE
    return Made(models.get_model(name, weights=None), torch.randn(1, *size))


def _timm(name: str) -> Made:
    timm = _extra("timm", "timm")
    if not timm.is_model(name.split(".", maxsplit=1)[0]):
        raise UsageError(
            f"timm has no model {name!r}\n  it has, among others:  {_like(name, timm.list_models())}"
        )
    model = timm.create_model(name, pretrained=False)
    size = getattr(model, "default_cfg", {}).get("input_size", _IMAGE)
    return Made(model, torch.randn(1, *size))


def _like(name: str, names: list[str]) -> str:
    import difflib  # noqa: PLC0415  only for the message

    return ", ".join(difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names[:5])


def _extra(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} is not installed\n  install it:  pip install {package}") from error
