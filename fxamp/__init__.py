"""fxamp: automatic mixed precision as a compiler pass.

``fxamp.convert(model)`` gives a module that computes what ``torch.autocast`` computes, bit for bit, with
every cast written in its graph.
"""

from fxamp.api import convert
from fxamp.compare import Comparison, compare
from fxamp.errors import (
    ArgumentError,
    CaptureError,
    ExportError,
    ExportWarning,
    FrozenError,
    FxampError,
    InvariantError,
    PlanWarning,
    PolicyError,
    RecaptureWarning,
)
from fxamp.export import Artifact, export, read_artifact
from fxamp.policy import CastPolicy, Policy
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.freeze import freeze
from fxamp.runtime.frozen_module import FrozenModule
from fxamp.runtime.grad_scaler import GradScaler
from fxamp.version import __version__ as __version__

__all__ = [
    "AmpModule",
    "ArgumentError",
    "Artifact",
    "CaptureError",
    "CastPolicy",
    "Comparison",
    "ExportError",
    "ExportWarning",
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
    "export",
    "freeze",
    "read_artifact",
]
