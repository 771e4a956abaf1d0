"""Module hooks whose code is recorded like the rest of ``forward``.

A hook is the user's own Python, which may print, count or collect at every call; a graph cannot replay that,
so a module with hooks runs eagerly.  These hooks of libraries only compute tensors, or collect them within
the call, so recording them gives what they give.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HOOK_DICTS", "INSTALLED", "all_known"]

_KNOWN = (
    # module                              name                                   what it does
    ("torch.nn.utils.weight_norm", "WeightNorm", "computes the weight of magnitude and direction"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm", "divides the weight by its largest singular value"),
    ("torch.nn.utils.prune", "", "multiplies the weight with its mask"),
    (
        "transformers.utils.output_capturing",
        "install_output_capuring_hook.<locals>.output_capturing_hook",
        "collects hidden states and attentions for the result of the same call",
    ),
)

HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")
"""The attributes of a module that hold such hooks."""

INSTALLED = frozenset({"_output_capturing_hooks_installed"})
"""Attributes that tell that hooks have been registered, by a model that does so in its first call."""


def is_known(hook: object) -> bool:
    """Whether *hook* is one of the table."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    module, name = getattr(named, "__module__", ""), getattr(named, "__qualname__", "")
    return any(module == known and name.startswith(prefix) for known, prefix, _ in _KNOWN)


def all_known(hooks: Mapping[int, object]) -> bool:
    """Whether all of *hooks*, an attribute of a module, are."""
    return all(map(is_known, hooks.values()))
