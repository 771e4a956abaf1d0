"""``Options``: how a model is converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxamp.capture.symbols import Sizes
from fxamp.policy import Policy

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """How a model is converted.

    Attributes:
        policy: Which operators are cast.
        sizes: Which sizes are symbolic; once a signature is seen with other sizes, all are.
        dynamic_shapes: The user's own choice of symbolic sizes, as for ``torch.export``.
        whole_loops: Whether an operator that loops over time (``gru``) is one node; else its steps are.
        recapture_limit: How often calls that differ only in values are captured; others run eagerly.
    """

    policy: Policy
    sizes: Sizes = Sizes.LEADING
    dynamic_shapes: Any = None
    recapture_limit: int = 16
    whole_loops: bool = True
