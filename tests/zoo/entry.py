"""What a list of the zoo is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

__all__ = ["LIBRARIES", "Entry", "Inputs", "entries"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Each library's list is ``tests.zoo.zoo_<library>``; what must be installed for it.
LIBRARIES = MappingProxyType(
    {
        "nn": "torch",
        "torchvision": "torchvision",
        "timm": "timm",
        "transformers": "transformers",
        "diffusers": "diffusers",
        "smp": "segmentation_models_pytorch",
        "pyg": "torch_geometric",
    }
)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo; nothing is built before it is asked for.

    Attributes:
        name: Unique within its library.
        library: A key of ``LIBRARIES``.
        build: Makes the model, with random weights from torch's generator.
        inputs: Makes the arguments of a call in training mode or evaluation mode (as the flag says).
        resized: The same with other sizes, where the model takes other sizes.
        modes: In which modes the model is checked.
        fast: Whether it belongs to the handful that every run of the tests checks.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[bool], Inputs]
    resized: Callable[[bool], Inputs] | None = None
    modes: tuple[str, ...] = ("eval", "train")
    fast: bool = False


def entries(library: str) -> tuple[Entry, ...]:
    """The list of *library*, which must be installed."""
    listed: tuple[Entry, ...] = import_module(f"tests.zoo.zoo_{library}").entries()
    return listed
