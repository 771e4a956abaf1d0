"""Numerics: a model under autocast beside eager autocast, float32 and float64, operator by operator."""

from fxamp.compare.compare import compare
from fxamp.compare.comparison import Bits, Comparison, NonFinite
from fxamp.compare.kinds import Finding, Kind
from fxamp.compare.rows import Row
from fxamp.compare.statistics import ULP_BOUNDS, Statistics

__all__ = ["ULP_BOUNDS", "Bits", "Comparison", "Finding", "Kind", "NonFinite", "Row", "Statistics", "compare"]
