"""The check of a written ONNX model: by ONNX's own checker, and by onnxruntime in a fresh process.

onnxruntime's kernels are not torch's, and round elsewhere.  So the distance from the converted model is told:
the signal to noise ratio in decibels over all outputs, and the largest error in units of the last place of
the low precision dtype.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from fxamp.compare.statistics import Tally, ordinal
from fxamp.errors import ExportError
from fxamp.export import onnx_reload
from fxamp.export.check import end_of, environment
from fxamp.export.onnx_kernels import lacking
from fxamp.export.onnx_widen import widen, widen_float16
from fxamp.export.onnx_write import save_copy

__all__ = ["ENOUGH", "Distance", "Loaded", "as_arrays", "check_model", "measure", "run_in_fresh_process"]

ENOUGH = 60.0
"""Decibels; below, the operator that is at fault is looked for."""


def check_model(path: Path) -> None:
    """Let ONNX's checker look at the model in the file *path*, with strict inference of shapes and dtypes.

    Raises:
        ExportError: It is not valid.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(
            f"the model that torch.onnx.export gave is not valid ONNX: {first}\n"
            "  a fault of fxamp or of torch's exporter: please report it; format='pt2' does without ONNX"
        ) from error


# --- running ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What onnxruntime gave.

    Attributes:
        outputs: By name; bfloat16 as float32.
        warnings: What it warned of while it loaded and ran the model.
        widened: Whether a model with the same values was run instead, whose bfloat16 operators run in
            float32.
    """

    outputs: Mapping[str, torch.Tensor]
    warnings: tuple[str, ...]
    widened: bool = False


def run_in_fresh_process(
    path: Path, inputs: Mapping[str, np.ndarray[Any, Any]], *, rounds_all: bool = False
) -> Loaded:
    """Run the model in the file *path* by onnxruntime's CPU provider.

    Args:
        path: The model.
        inputs: The arrays of the call, by name.
        rounds_all: Whether the provider is kept from leaving out casts to float16 and back.

    Raises:
        ExportError: It does not load, or the call fails.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fxamp-check-") as folder:
        file, widened = path, False
        model = ir.load(path)
        if rounds_all or _is_bfloat16(model):
            file, widened = Path(folder, "widened.onnx"), _is_bfloat16(model)
            if rounds_all:
                widen_float16(model)
            widen(model)
            save_copy(model, file)
        given, got = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(given, **inputs)  # type: ignore[arg-type]
        optimize = "no" if rounds_all else "yes"
        source = Path(onnx_reload.__file__).read_text(encoding="utf-8")
        command = [sys.executable, "-c", source, file, given, got, torch.get_num_threads(), optimize]
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
        if done.returncode != 0:
            what = "run" if "loaded" in done.stdout else "load"
            raise ExportError(f"onnxruntime does not {what} the model:\n{end_of(done.stderr, 8, 400)}")
        outputs = {name: torch.from_numpy(value) for name, value in np.load(got).items()}
    warned = tuple(dict.fromkeys(filter(None, map(_warning, done.stderr.splitlines()))))
    return Loaded(outputs, warned, widened)


_WARNING = re.compile(r"\[[WE]:onnxruntime:[^\]]*\] ([^\x1b]*)")


def _warning(line: str) -> str:
    """``text`` of ``2026-01-01 12:00:00 [W:onnxruntime:, file.cc:1 F] text``, which may be coloured."""
    found = _WARNING.search(line)
    return found[1].strip() if found else ""


def _is_bfloat16(model: ir.Model) -> bool:
    ports = (*model.graph.inputs, *model.graph.outputs)
    return "bfloat16" in lacking(model) or any(value.dtype == ir.DataType.BFLOAT16 for value in ports)


def as_arrays(leaves: Sequence[Any], names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a call by the names of the inputs; bfloat16 as float32, which has the same values."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    wide = [leaf.float() if leaf.dtype is torch.bfloat16 else leaf for leaf in tensors]
    return {name: leaf.detach().cpu().numpy() for name, leaf in zip(names, wide, strict=True)}


# --- the distance -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far results are from those of the converted model.

    Attributes:
        sqnr_db: Signal to noise of the worst output; ``inf`` where all are equal.
        ulp: The largest error in units of the last place of the low precision dtype.
        bad: Elements that are finite on one side only, or integers that differ.
        lost: Elements that are finite on neither side.
    """

    sqnr_db: float
    ulp: int
    bad: int = 0
    lost: int = 0

    def __str__(self) -> str:
        text = "the same values" if self.sqnr_db == math.inf else f"{self.sqnr_db:.1f} dB"
        text += f", at most {self.ulp:,} ulp from the converted model"
        text += f"; {self.bad:,} elements are finite in one of them only" if self.bad else ""
        return text + (f"; {self.lost:,} elements are finite in neither" if self.lost else "")


def measure(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], low: torch.dtype) -> Distance:
    """The distance of *got* from *wanted*, over tensors of the same shapes.

    Raises:
        ExportError: The number of tensors or a shape is another.
    """
    shapes = [tuple(tensor.shape) for tensor in got], [tuple(tensor.shape) for tensor in wanted]
    if shapes[0] != shapes[1]:
        raise ExportError(f"onnxruntime gives tensors of shapes {shapes[0]} instead of {shapes[1]}")
    found = [_distance(one, other, low) for one, other in zip(got, wanted, strict=True)]
    return Distance(
        min((each.sqnr_db for each in found), default=math.inf),
        max((each.ulp for each in found), default=0),
        sum(each.bad for each in found),
        sum(each.lost for each in found),
    )


def _distance(got: torch.Tensor, wanted: torch.Tensor, low: torch.dtype) -> Distance:
    if not wanted.is_floating_point():
        return Distance(math.inf, 0, int((got != wanted).sum()))
    tally = Tally()
    tally.add(got.float(), wanted.float())
    one, other = got.to(low), wanted.to(low)
    finite = torch.isfinite(one) & torch.isfinite(other)
    bad = int((torch.isfinite(one) != torch.isfinite(other)).sum())
    lost = one.numel() - int(finite.sum()) - bad
    steps = (ordinal(one[finite]) - ordinal(other[finite])).abs()
    return Distance(tally.read().sqnr_db, int(steps.max()) if steps.numel() else 0, bad, lost)
