"""Where the real tensors of a module live.

A captured graph names each parameter, buffer and plain tensor attribute by its place, and a call reads
the place anew.  So an optimiser's update, ``.to()``, ``load_state_dict(assign=True)`` and a rebound
buffer are all seen, and a tensor that sits in two places is one node: tied stays tied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fxamp.ir.modules import is_opaque

__all__ = ["Constant", "Place", "Source", "places_of"]


@dataclass(frozen=True)
class Place:
    """A tensor attribute of a module.

    Attributes:
        path: Dotted path of the module, ``""`` for the root.
        kind: ``"_parameters"``, ``"_buffers"`` or ``""`` for a plain attribute.
        name: Its name there.
    """

    path: str
    kind: str
    name: str

    @property
    def qualified(self) -> str:
        """Dotted path of the tensor itself."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def slot(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """The dict under *root* that holds the tensor under :attr:`name`."""
        attributes = root.get_submodule(self.path).__dict__
        return attributes[self.kind] if self.kind else attributes


@dataclass(frozen=True)
class Constant:
    """A tensor that lives in no module: made while capturing, or reached through a closure."""

    tensor: torch.Tensor


Source = Place | Constant


def places_of(root: nn.Module) -> dict[int, tuple[torch.Tensor, Place]]:
    """By ``id``, every tensor found in *root*'s modules, with the first place that holds it."""
    places: dict[int, tuple[torch.Tensor, Place]] = {}
    for path, module in root.named_modules():
        if is_opaque(module):
            continue
        for kind in ("_parameters", "_buffers", ""):
            attributes = module.__dict__[kind] if kind else module.__dict__
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor):
                    places.setdefault(id(value), (value, Place(path, kind, name)))
    return places
