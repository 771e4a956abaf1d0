"""The check of a written artifact: loaded and run in a fresh process that cannot import fxamp."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fxamp.compare.statistics import Tally
from fxamp.errors import ExportError
from fxamp.export import reload

__all__ = ["FreshProcess", "differences", "distance", "end_of", "environment", "run_in_fresh_process"]


class FreshProcess:
    """A process that cannot import fxamp, for any number of artifacts; :meth:`close` ends it.

    Args:
        device_type: Whose autocast the regions are of.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        source = Path(reload.__file__).read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment(),
        )  # fmt: skip

    def run(
        self,
        artifact: Path,
        calls: Sequence[tuple[Any, Any]],
        *,
        format: str = "pt2",  # noqa: A002
        imports: Sequence[str] = (),
        ambient: Sequence[str | None] | None = None,
    ) -> list[Any]:
        """For each of *calls* the leaves of what *artifact* gives, or the text of the error that it raises.

        Args:
            artifact: A file of format ``"pt2"`` or ``"aoti"``.
            calls: ``(args, kwargs)`` of each.
            format: Which of them.
            imports: What to import before it is loaded.
            ambient: For each call, the dtype of an autocast region around it.

        Raises:
            ExportError: It cannot be loaded.
        """
        with tempfile.TemporaryDirectory() as folder:
            given, got = Path(folder, "calls.pt"), Path(folder, "results.pt")
            torch.save(list(calls), given)
            request = {
                "artifact": str(artifact), "format": format, "imports": list(imports), "calls": str(given),
                "results": str(got), "ambient": list(ambient or [None] * len(calls)),
                "threads": torch.get_num_threads(), "device_type": self._device_type,
            }  # fmt: skip
            error = self._ask(json.dumps(request))
            if error:
                raise ExportError(f"the artifact does not run in a fresh process:\n{end_of(error)}")
            results: list[Any] = torch.load(got, weights_only=False)
        return results

    def _ask(self, request: str) -> str:
        """What went wrong; ``""`` if nothing has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line == "done\n":
                return ""
            with suppress(ValueError):  # what a library prints is no answer
                answer = json.loads(line)
                if isinstance(answer, str):
                    return answer
        self._errors.seek(0)
        return self._errors.read() or f"it ended with code {self._process.wait()}"

    @property
    def is_alive(self) -> bool:
        """Whether it takes further requests."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def run_in_fresh_process(
    artifact: Path,
    call: tuple[Any, Any],
    *,
    format: str,  # noqa: A002
    device_type: str,
    imports: Sequence[str] = (),
    ambient: str | None = None,
) -> list[Any]:
    """The leaves of what *artifact* gives for *call*; see :meth:`FreshProcess.run`.

    Raises:
        ExportError: It cannot be loaded, or the call fails.
    """
    process = FreshProcess(device_type)
    try:
        (result,) = process.run(artifact, [call], format=format, imports=imports, ambient=[ambient])
    finally:
        process.close()
    if isinstance(result, str):
        raise ExportError(f"the artifact does not run in a fresh process:\n{end_of(result)}")
    leaves: list[Any] = result
    return leaves


def differences(got: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    """Where the leaves of a result have other bits, a line each."""
    if len(got) != len(wanted):
        return [f"{len(got)} results instead of {len(wanted)}"]
    pairs = zip(got, wanted, strict=True)
    found = [(index, _difference(one, other)) for index, (one, other) in enumerate(pairs)]
    return [f"result {index}: {text}" for index, text in found if text]


def _difference(got: Any, wanted: Any) -> str:
    if not isinstance(wanted, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if got == wanted else f"{got!r} instead of {wanted!r}"
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"{got.dtype} {tuple(got.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    same = (got == wanted) | (got.isnan() & wanted.isnan()) if got.is_floating_point() else got == wanted
    other = same.numel() - int(same.sum())
    return f"{other} of {same.numel()} elements differ" if other else ""


def distance(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """How far two results are from each other: signal to noise in dB, and units in the last place.

    Of either the worst tensor counts; they need not be the same.
    """
    pairs = _floats(got, wanted)
    decibels = min((_sqnr(one, other) for one, other in pairs), default=math.inf)
    ulps = max((_ulps(one, other) for one, other in pairs), default=0)
    return f"{decibels:.1f} dB, at most {ulps:,} ulp from the converted model"


def _floats(got: Sequence[Any], wanted: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = zip(got, wanted, strict=True)
    return [
        (one, other) for one, other in pairs if isinstance(other, torch.Tensor) and other.is_floating_point()
    ]


def _sqnr(got: torch.Tensor, wanted: torch.Tensor) -> float:
    tally = Tally()
    tally.add(got, wanted)
    return tally.read().sqnr_db


def _ulps(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """The largest distance in representable numbers of *wanted*'s dtype."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.dtype.itemsize]

    def ordered(value: torch.Tensor) -> torch.Tensor:
        bits = value.to(wanted.dtype).contiguous().view(integer).long()
        return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)

    return int((ordered(got) - ordered(wanted)).abs().max()) if got.numel() else 0


def environment() -> dict[str, str]:
    """That of a fresh process, which finds the modules that this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}


def end_of(text: str, lines: int = 20, width: int | None = None) -> str:
    """The last lines of what a process has said, each with a mark before it and cut at *width*."""
    return "\n".join(f"  | {line[:width]}" for line in text.strip().splitlines()[-lines:])
