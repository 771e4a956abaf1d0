"""ONNX files of fxamp beside those that other tools make of the same model's float32 file.

=========  ============================================================================================
tool       how it is called
=========  ============================================================================================
fxamp      ``fxamp.export(model, ..., outputs="keep")``: outputs in float32, as the others give them
converter  ``onnxconverter_common.float16.convert_float_to_float16(model, keep_io_types=True)``
autocast   ``modelopt.onnx.autocast.convert_to_mixed_precision(path, keep_io_types=True)``
=========  ============================================================================================

Each file is checked by ONNX's checker and run by onnxruntime's CPU provider; its outputs are compared with
those of the float32 model in torch.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxamp
from benchmarks.onnx_casts import casts_of
from fxamp.export.onnx_check import as_arrays, measure, run_in_fresh_process
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import Entry, Inputs
from tests.zoo.leaves import named_tensors

__all__ = ["SMALL", "print_rivals"]

SMALL = MappingProxyType({
    "torchvision": ("squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5",
                    "mnasnet0_5"),
    "timm": ("test_byobnet", "test_convnext", "test_efficientnet", "test_resnet", "test_vit", "test_nfnet"),
    "transformers": ("albert", "bert", "distilbert", "gpt2", "llama", "t5", "vit"),
    "diffusers": ("autoencoder-tiny", "dit", "unet-2d"),
})  # fmt: skip
"""By library, models that take seconds."""

NO_TRAINING = (False,)
_DECIBELS = 0.5  # less is noise: kernels round in another order


@dataclass
class File:
    """What a tool made of a model.

    Attributes:
        fails: What went wrong; empty if nothing did.
        size: Bytes.
        casts: ``Cast`` nodes.
        max_abs: Largest error against the float32 model.
        sqnr_db: Signal to noise against it; ``-inf`` if a value is not finite.
    """

    fails: str = ""
    size: int = 0
    casts: int = 0
    max_abs: float = math.inf
    sqnr_db: float = -math.inf


@dataclass(frozen=True)
class Case:
    """A model, a call of it, and what it gives."""

    model: torch.nn.Module
    call: Inputs
    wanted: list[torch.Tensor]
    low: torch.dtype
    folder: Path

    @property
    def float32(self) -> Path:
        """The file that the other tools start from."""
        return self.folder / "float32.onnx"


def print_rivals(chosen: Sequence[Entry], low: torch.dtype, limit: int) -> None:
    """Make and compare the files of all tools for those of *chosen* that are small; print the table."""
    found: dict[str, dict[str, File]] = {}
    for entry in chosen:
        if entry.name in SMALL.get(entry.library, ()):
            name = f"{entry.library}/{entry.name}"
            found[name] = _files(entry, low, limit)
            print(name, found[name], flush=True)
    table = Table(title=f"ONNX files against the float32 model, {low}, onnxruntime's CPU provider")
    table.add_column("model")
    for tool in TOOLS:
        for column in (tool, "bytes", "casts", "max error", "dB"):
            table.add_column(column, justify="right")
    for name, files in found.items():
        table.add_row(name, *(cell for tool in TOOLS for cell in _cells(files[tool])))
    console = Console(width=200)
    console.print(table)
    for name, files in found.items():
        for tool in TOOLS:
            if files[tool].fails:
                console.print(f"{name}: {tool}: {files[tool].fails[:300]}", markup=False, highlight=False)
    for aspect, is_worse in ASPECTS.items():
        worse = [
            f"{name} than {tool}"
            for name, files in found.items()
            for tool in TOOLS
            if tool != "fxamp" and not files[tool].fails and is_worse(files["fxamp"], files[tool])
        ]
        console.print(f"fxamp worse at: {aspect}: {', '.join(worse) or 'none'}", highlight=False)


ASPECTS: Mapping[str, Callable[[File, File], bool]] = MappingProxyType({
    "loading": lambda one, other: bool(one.fails),
    "size": lambda one, other: one.size > other.size,
    "casts": lambda one, other: one.casts > other.casts,
    "max error": lambda one, other: one.max_abs > other.max_abs * 10 ** (_DECIBELS / 20),
    "dB": lambda one, other: one.sqnr_db < other.sqnr_db - _DECIBELS,
})  # fmt: skip


def _cells(file: File) -> list[str]:
    if file.fails:
        return ["fails", "-", "-", "-", "-"]
    return ["loads", f"{file.size:,}", str(file.casts), f"{file.max_abs:.1e}", f"{file.sqnr_db:.1f}"]


def _files(entry: Entry, low: torch.dtype, limit: int) -> dict[str, File]:
    seed_all(0)
    model = entry.build().eval()
    seed_all(1)
    call = entry.inputs(*NO_TRAINING)
    with torch.no_grad():
        result = model(*copy.deepcopy(call[0]), **copy.deepcopy(call[1]))
    wanted = list(named_tensors(result).values())
    with tempfile.TemporaryDirectory() as folder:
        case = Case(model, call, wanted, low, Path(folder))
        return {tool: _try_to_make(make, case, limit) for tool, make in TOOLS.items()}


def _try_to_make(make: Callable[[Case, Path], None], case: Case, limit: int) -> File:
    path = case.folder / "made.onnx"
    path.unlink(missing_ok=True)
    file = File()
    try:
        with time_limit(limit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            make(case, path)
            file.size = sum(each.stat().st_size for each in case.folder.glob("made.onnx*"))
            file.casts = casts_of(path).all
            onnx.checker.check_model(str(path), full_check=True)
            _measure(case, path, file)
    except TimeLimitError:
        file.fails = f"takes more than {limit} s"
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        file.fails = " ".join(f"{type(error).__name__}: {error}".split())
    return file


def _measure(case: Case, path: Path, file: File) -> None:
    graph = onnx.load(str(path), load_external_data=False).graph
    inputs = as_arrays(pytree.tree_leaves(case.call), [value.name for value in graph.input])
    outputs = run_in_fresh_process(path, inputs).outputs
    got = [outputs[value.name] for value in graph.output]
    distance = measure(got, case.wanted, case.low)
    file.sqnr_db = -math.inf if distance.bad else distance.sqnr_db
    errors = [(one.float() - other.float()).abs() for one, other in zip(got, case.wanted, strict=True)]
    file.max_abs = max(float(error.max()) for error in errors if error.numel())


# --- tools --------------------------------------------------------------------------------------------


def _by_fxamp(case: Case, path: Path) -> None:
    args, kwargs = copy.deepcopy(case.call)
    fxamp.export(
        case.model, args, kwargs, path, dtype=case.low, device_type="cpu", outputs="keep", check=False
    )


def _by_converter(case: Case, path: Path) -> None:
    from onnxconverter_common import float16  # noqa: PLC0415  may be missing

    _write_float32(case)
    model = float16.convert_float_to_float16(onnx.load(str(case.float32)), keep_io_types=True)
    onnx.save(model, str(path))


def _by_autocast(case: Case, path: Path) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision  # noqa: PLC0415  may be missing

    _write_float32(case)
    low = "bf16" if case.low is torch.bfloat16 else "fp16"
    model = convert_to_mixed_precision(str(case.float32), low_precision_type=low, keep_io_types=True)
    onnx.save(model, str(path))


def _write_float32(case: Case) -> None:
    if case.float32.exists():
        return
    args, kwargs = copy.deepcopy(case.call)
    program: Any = torch.onnx.export(case.model, args, kwargs=kwargs, dynamo=True, verbose=False)
    program.save(str(case.float32), external_data=False)


TOOLS: Mapping[str, Callable[[Case, Path], None]] = MappingProxyType({
    "fxamp": _by_fxamp, "converter": _by_converter, "autocast": _by_autocast,
})  # fmt: skip
