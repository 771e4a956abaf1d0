"""fxamp: automatic mixed precision as a compiler pass.

``fxamp.convert(model)`` gives a module that computes what ``torch.autocast`` computes, bit for bit, with
every cast written in its graph.
"""

from fxamp.api import convert
from fxamp.compare import Comparison, compare
from fxamp.errors import (
    ArgumentError,
    CaptureError,
    FrozenError,
    FxampError,
    InvariantError,
    PlanWarning,
    PolicyError,
    RecaptureWarning,
)
from fxamp.policy import CastPolicy, Policy
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.freeze import freeze
from fxamp.runtime.frozen_module import FrozenModule
from fxamp.runtime.grad_scaler import GradScaler

__all__ = [
    "AmpModule",
    "ArgumentError",
    "CaptureError",
    "CastPolicy",
    "Comparison",
    "FrozenError",
    "FrozenModule",
    "FxampError",
    "GradScaler",
    "InvariantError",
    "PlanWarning",
    "Policy",
    "PolicyError",
    "RecaptureWarning",
    "compare",
    "convert",
    "freeze",
]

__version__ = "0.1.0"
