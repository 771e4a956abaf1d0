"""What becomes of each model of the zoo as an ONNX file in half precision.

Each model of the lists in ``tests/zoo`` (of torchvision, those that classify) is exported and checked: by
ONNX's checker, and by onnxruntime in a fresh process against the converted model.  Its casts are counted in
the written file.  The table is by library; below it stands each model that is no success, with the cause.

With ``--against``, twenty small models are also converted by other tools; see ``onnx_rivals``.

    python benchmarks/onnx_export.py [--library timm] [--name resnet] [--limit SECONDS] [--count MODELS]
                                     [--dtype fp16 | bf16] [--jsonl FILE [--resume]] [--shuffle]
                                     [--table FILE] [--against]
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxamp
from benchmarks.onnx_casts import casts_of
from benchmarks.onnx_rivals import print_rivals
from benchmarks.sweep import append, by_library, options_of, quiet, read
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import Entry

LIBRARIES = ("torchvision", "timm", "transformers", "diffusers")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NO_TRAINING = (False,)
ENOUGH = 60.0  # decibels; below, the operator that causes it must be named
COLUMNS = (
    "models", "written", "without warnings", ">= 60 dB", "or named", "median dB", "weights <= 0.51", "median",
    "casts", "of weights", "chains", "roundings", "out of time",
)  # fmt: skip
_HALF = 0.51  # of the bytes of float32 weights

_REFUSALS = {
    "is not valid ONNX": "invalid",
    "does not load the model": "not loaded",
    "does not run the model": "not run",
}


@dataclass
class Result:
    """What came out for one model.

    Attributes:
        library: Of the model.
        name: Of the model.
        dtype: ``fp16`` or ``bf16``.
        status: ``written``, ``refused`` (by fxamp or torch's exporter), ``invalid``, ``not loaded``,
            ``not run``, ``fails``, ``time``, ``eager fails`` or ``build fails``.
        sqnr_db: Signal to noise against the converted model; ``inf`` if all values are equal.
        ulp: The largest error in units of the last place of the low precision dtype.
        differs: What else the check tells of differences, or the operator that causes the noise.
        warnings: What onnxruntime warns of.
        weights: Bytes of the weights over those in float32.
        file_bytes: Of the file and its external data.
        casts: ``Cast`` nodes.
        weight_casts: Those that read a weight.
        chains: Those that read another cast.
        roundings: Those among the chains that round on purpose.
        seconds: In all.
        error: Why it is no success.
    """

    library: str
    name: str
    dtype: str
    status: str = "written"
    sqnr_db: float = math.nan
    ulp: int = 0
    differs: str = ""
    warnings: str = ""
    weights: float = 0.0
    file_bytes: int = 0
    casts: int = 0
    weight_casts: int = 0
    chains: int = 0
    roundings: int = 0
    seconds: float = 0.0
    error: str = ""


def main() -> None:
    """Run what is asked for and print the table."""
    options = _options()
    quiet()
    if options.table:
        print_table(_read(options.table))
        return
    chosen = list(_chosen(options))
    if options.against:
        print_rivals(chosen, DTYPES[options.dtype], options.limit)
        return
    done = _read(options.jsonl) if options.resume and options.jsonl.exists() else []
    known = {(result.library, result.name, result.dtype) for result in done}
    for entry in chosen:
        if (entry.library, entry.name, options.dtype) in known:
            continue
        result = _try_to_export(entry, options.dtype, options.limit)
        done.append(result)
        print(
            f"{result.library}/{result.name}: {result.status}, {result.sqnr_db} dB, {result.ulp} ulp,"
            f" weights {result.weights:.3f}, {result.casts} casts, {result.weight_casts} of weights,"
            f" {result.chains} chains, {result.seconds} s {result.differs} {result.error[:400]}",
            flush=True,
        )
        append(options.jsonl, asdict(result))
    print_table(done)


def _options() -> argparse.Namespace:
    parser = options_of("Export models to ONNX and check what was written.", LIBRARIES, limit=120)
    parser.add_argument("--count", type=int, help="only so many models of each library")
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES), help="the low precision dtype")
    parser.add_argument("--against", action="store_true", help="compare with other tools")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> Iterator[Entry]:
    for listed in by_library(options, LIBRARIES):
        named = [entry for entry in listed if "eval" in entry.modes and _classifies(entry)]
        if options.shuffle:
            random.Random(0).shuffle(named)
        yield from named[: options.count]


def _classifies(entry: Entry) -> bool:
    """Whether a model of torchvision does; of other libraries all are taken."""
    if entry.library != "torchvision":
        return True
    from torchvision import models  # noqa: PLC0415  may be missing

    return entry.name in models.list_models(module=models)


def _read(path: Path) -> list[Result]:
    return read(path, Result, lambda result: (result.library, result.name, result.dtype))


# --- one model ----------------------------------------------------------------------------------------


def _try_to_export(entry: Entry, dtype: str, limit: int) -> Result:
    result = Result(entry.library, entry.name, dtype)
    start = time.perf_counter()
    try:
        with time_limit(limit), tempfile.TemporaryDirectory() as folder:
            _export(entry, result, Path(folder, "model.onnx"))
    except TimeLimitError:
        result.status = "time"
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        result.status = _status_of(error)
        result.error = f"{type(error).__name__}: {error}"
        if not _runs_eagerly(entry, DTYPES[dtype], limit):
            result.status = "eager fails"
    result.seconds = round(time.perf_counter() - start, 1)
    gc.collect()
    return result


def _status_of(error: Exception) -> str:
    if not isinstance(error, fxamp.FxampError):
        return "fails"
    return next((status for text, status in _REFUSALS.items() if text in str(error)), "refused")


def _runs_eagerly(entry: Entry, dtype: torch.dtype, limit: int) -> bool:
    try:
        with time_limit(limit), torch.no_grad(), torch.autocast("cpu", dtype):
            args, kwargs = entry.inputs(*NO_TRAINING)
            entry.build().eval()(*args, **kwargs)
    except TimeLimitError:
        return True
    except Exception:  # noqa: BLE001  a list may be wrong about a library's version
        return False
    return True


def _export(entry: Entry, result: Result, path: Path) -> None:
    seed_all(0)
    try:
        model = entry.build().eval()
    except Exception as error:  # noqa: BLE001  a list may be wrong about a library's version
        result.status, result.error = "build fails", f"{type(error).__name__}: {error}"
        return
    seed_all(1)
    args, kwargs = copy.deepcopy(entry.inputs(*NO_TRAINING))
    artifact = fxamp.export(model, args, kwargs, path, dtype=DTYPES[result.dtype], device_type="cpu")
    found = casts_of(path)
    result.casts, result.weight_casts = found.all, found.of_weights
    result.chains, result.roundings = found.chains, found.roundings
    result.weights = artifact.weight_bytes / max(artifact.float32_bytes, 1)
    result.file_bytes = sum(file.stat().st_size for file in path.parent.iterdir())
    _read_check(artifact.check, result)


def _read_check(text: str, result: Result) -> None:
    """What the artifact says of its check: ``onnxruntime CPU; 71.5 dB, at most 2 ulp from ...; ...``."""
    distance = re.search(r"(?:([-\d.]+|inf|nan) dB|the same values), at most ([\d,]+) ulp", text)
    assert distance is not None, text
    result.sqnr_db = float(distance[1] or math.inf)
    result.ulp = int(distance[2].replace(",", ""))
    parts = text[distance.end() :].split("; ")[1:]
    result.warnings = "; ".join(part for part in parts if part.startswith("warns: "))
    result.differs = "; ".join(part for part in parts if not part.startswith("warns: "))


# --- the table ----------------------------------------------------------------------------------------


def print_table(results: list[Result]) -> None:
    """The table by library, and each exception with its cause."""
    table = Table(title="models as ONNX files in half precision, by onnxruntime's CPU provider")
    table.add_column("library")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[f"{result.library} {result.dtype}"].append(result)
    for library, found in groups.items():
        table.add_row(library, *_row(found))
    table.add_row("all", *_row(results))
    console = Console(width=170)
    console.print(table)
    for result in results:
        for text in _exceptions(result):
            console.print(
                f"{result.library}/{result.name} {result.dtype}: {text}", markup=False, highlight=False
            )
    console.print(dict(Counter(result.status for result in results)))


def _row(results: Sequence[Result]) -> list[str]:
    counted = [result for result in results if result.status not in ("eager fails", "build fails", "time")]
    written = [result for result in counted if result.status == "written"]
    ratios = sorted(result.sqnr_db for result in written)
    weights = sorted(result.weights for result in written if result.weights)
    return [
        str(len(counted)),
        str(len(written)),
        str(sum(not result.warnings for result in written)),
        str(sum(result.sqnr_db >= ENOUGH for result in written)),
        str(sum(result.sqnr_db < ENOUGH and _is_named(result) for result in written)),
        f"{ratios[len(ratios) // 2]:.0f}" if ratios else "-",
        f"{sum(weight <= _HALF for weight in weights)} of {len(weights)}",
        f"{weights[len(weights) // 2]:.3f}" if weights else "-",
        str(sum(result.casts for result in written)),
        str(sum(result.weight_casts for result in written)),
        str(sum(result.chains - result.roundings for result in written)),
        str(sum(result.roundings for result in written)),
        str(sum(result.status == "time" for result in results)),
    ]


def _is_named(result: Result) -> bool:
    return "noise comes in at" in result.differs


def _exceptions(result: Result) -> Iterator[str]:
    if result.status != "written":
        yield f"{result.status}: {_one_line(result.error)}"
        return
    if not result.sqnr_db >= ENOUGH:
        yield f"{result.sqnr_db:.1f} dB, {result.ulp} ulp: {_one_line(result.differs)}"
    elif result.differs:
        yield _one_line(result.differs)
    if result.warnings:
        yield _one_line(result.warnings)
    if result.weights > _HALF:
        yield f"weights {result.weights:.3f} of float32"
    if result.weight_casts:
        yield f"{result.weight_casts} casts of weights"
    if result.chains > result.roundings:
        yield f"{result.chains - result.roundings} casts of casts"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main()
