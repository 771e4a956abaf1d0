"""The format ``onnx``: a model for ONNX runtimes, its weights in the dtypes that its operators read.

===============  =======================================================================================
step             module
===============  =======================================================================================
translate        ``onnx_translate``: torch's exporter, names, the opset; ``onnx_attention``,
                 ``onnx_rounded``, ``onnx_split``: operators that it rounds or casts too often
legalize         ``onnx_legalize``: no operator has dtypes that ONNX forbids
tidy             ``onnx_tidy``: no cast of a weight, no constant arithmetic
write            ``onnx_write``: one file, or two from 1.5 GiB of weights on
check            ``onnx_check``: ONNX's checker, then onnxruntime in a fresh process; ``onnx_blame``:
                 where noise comes in
===============  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fxamp.errors import ExportError
from fxamp.export.artifact import Artifact
from fxamp.export.deployed import Deployed

__all__ = ["require_packages", "without_fused_attention", "write_onnx"]


def require_packages(*, check: bool) -> None:
    """See that what is needed is installed, before a model is captured.

    Raises:
        ExportError: A package is missing.
    """
    needed = ("onnx", "onnxscript", "onnx_ir", *(("onnxruntime",) if check else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        without = "; check=False does without onnxruntime" if missing == ["onnxruntime"] else ""
        raise ExportError(
            f"format='onnx' needs {' and '.join(missing)}\n  pip install 'fxamp[onnx]'{without}"
        )


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Let torch's transformer layers run operator by operator: ONNX has none like their fused kernels."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def write_onnx(
    deployed: Deployed,
    artifact: Artifact,
    path: Path,
    dynamic_shapes: Any,
    *,
    check: bool,
    external_data: bool | None = None,
) -> Artifact:
    """Write *deployed* to the file *path*, and what does not fit into it to one beside it.

    Args:
        deployed: The program; captured :func:`without_fused_attention`.
        artifact: What it says about itself so far.
        path: The file.
        dynamic_shapes: As for ``torch.export.export``.
        check: Whether onnxruntime is to run what was written.
        external_data: Whether the weights lie in a file beside it; ``None``: if they take more than 1.5 GiB.

    Returns:
        *artifact* with the names of the file and its counts.

    Raises:
        ExportError: torch's exporter refuses the program, or the file is not right or cannot be written.
    """
    require_packages(check=check)
    from fxamp.export.onnx_pipeline import run_pipeline  # noqa: PLC0415  its packages are an extra

    return run_pipeline(deployed, artifact, path, dynamic_shapes, check=check, external_data=external_data)
