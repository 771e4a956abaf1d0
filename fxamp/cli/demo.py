"""Train a small network on real data under eager autocast and through fxamp, and compare the bits."""

from __future__ import annotations

from fxamp.demo import add_arguments
from fxamp.demo import command as run

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "train a small network under autocast and through fxamp, and compare the bits"
