"""Take back what a call has done to a model, where it has to begin again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Undo"]


class Undo:
    """The states of torch's random generators, and the values of the tensors that are saved."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._random = torch.get_rng_state()
        initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if initialized else []

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the values of *tensors*, those that are about to be written to, perhaps."""
        for tensor in tensors:
            if id(tensor) not in self._saved and not tensor.is_inference():
                self._saved[id(tensor)] = (tensor, tensor._version, tensor.detach().clone())

    def restore(self) -> None:
        """Put everything back as it was."""
        for tensor, version, value in self._saved.values():
            # batch_norm writes to its statistics without raising their version
            if tensor._version != version or not torch.equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
