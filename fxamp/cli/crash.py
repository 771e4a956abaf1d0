"""What to print of an exception: the frames of the user's code, not ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

__all__ = ["describe"]

_OURS = f"{Path(__file__).resolve().parents[1]}/"
_PASSES = f"{Path(__file__).resolve().parents[2] / 'passes'}/"
_TORCH = f"{Path(torch.__file__).parent}/"


def describe(error: BaseException) -> str:
    """The traceback of *error* without the frames of fxamp; all of it if no other code was running."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_OURS, _PASSES, "<fxamp"))]
    entry = next((i for i, frame in enumerate(theirs) if not frame.filename.startswith(_TORCH)), None)
    names = [Path(frame.filename).name for frame in theirs]
    if entry is None or names == ["__main__.py"] or all(_is_launcher(frame.filename) for frame in theirs):
        return "".join(traceback.format_exception(error)).rstrip()
    shown = [frame for frame in theirs if not _is_launcher(frame.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _is_launcher(file: str) -> bool:
    """Whether *file* only starts programs."""
    return file.startswith("<frozen") or Path(file).name in ("fxamp", "runpy.py")
