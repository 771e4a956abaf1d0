"""What is done about weights and constants that low precision does not have, as the caller chose.

=========  ==============================================================================
warn       an ``ExportWarning`` with each of them; the artifact has eager autocast's bits
error      an ``ExportError`` with each of them, and nothing is written
clamp      they become the nearest that fit; the artifact's results are its own
=========  ==============================================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch

from fxamp.errors import ArgumentError, ExportError, ExportWarning
from fxamp.export.clamp import clamped
from fxamp.export.deployed import Deployed, module_of
from fxamp.export.fits import tell, unfit

__all__ = ["Fit", "check_fit", "fitted"]

Fit = Literal["warn", "error", "clamp"]

_WAY_OUT = "  export with the policy that a line suggests, or fit='clamp' to change the constants"


def check_fit(fit: str) -> None:
    """Refuse what is no choice.

    Raises:
        ArgumentError: It is none.
    """
    if fit not in get_args(Fit):
        raise ArgumentError(f"fit={fit!r}: it is one of {', '.join(map(repr, get_args(Fit)))}")


def fitted(deployed: Deployed, weights: Mapping[str, torch.Tensor], fit: Fit) -> Deployed:
    """*deployed* with what does not fit told, or clamped.

    Args:
        deployed: The program.
        weights: The float32 weights by their names in the model, as far as they are still there.
        fit: What to do.

    Raises:
        ExportError: Something does not fit, and *fit* is ``"error"``.
    """
    if fit == "clamp":
        graph_module, changed = clamped(deployed.graph_module, weights)
        if not changed:
            return deployed
        told = tuple(f"clamped: {finding}" for finding in changed)
        module = module_of(graph_module, deployed)
        return replace(deployed, graph_module=graph_module, module=module, findings=told, clamped=True)
    findings = unfit(deployed.graph_module, weights)
    if not findings:
        return deployed
    text = f"{tell(findings)}\n{_WAY_OUT}"
    if fit == "error":
        raise ExportError(text)
    warnings.warn(text, ExportWarning, stacklevel=3)
    return replace(deployed, findings=tuple(map(str, findings)))
