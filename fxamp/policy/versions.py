"""Which rows of the table came in which version of torch, for policies that are pinned to an older one.

The table is a superset; the dispatcher knows which rows hold in the installed torch.  A row that is younger
than the version asked for is taken out again.  Source: what the dispatchers of 2.13 and 2.14 register, and
torch issue 188955 for ``rms_norm``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from fxamp.errors import PolicyError

__all__ = ["FIRST", "is_in_version", "parsed"]

FIRST = (2, 11)
"""The oldest version of torch that the table covers."""

_SINCE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"aten::rms_norm": (2, 12), "aten::linalg_matrix_sqrth": (2, 14)}
)


def is_in_version(op: str, version: tuple[int, int]) -> bool:
    """Whether autocast had a rule for *op* in *version*, given that it has one now."""
    return version >= _SINCE.get(op, FIRST)


def parsed(version: str) -> tuple[int, int]:
    """``"2.11"`` or ``"2.11.0+cpu"`` as a pair.

    Raises:
        PolicyError: It is no version, or one that the table does not cover or that is not installed yet.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise PolicyError(f"torch_version={version!r} is no version of torch\n  write it like '2.11'")
    found, installed = (int(match[1]), int(match[2])), _installed()
    if not FIRST <= found <= installed:
        first, last = (".".join(map(str, pair)) for pair in (FIRST, installed))
        raise PolicyError(f"the lists of torch {version} are not known here; those of {first} to {last} are")
    return found


def _installed() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
