"""The format ``aoti``: a package of compiled code, for Python and C++, with the weights in it.

Inductor is told to round where the graph rounds (``emulate_precision_casts``).  It may still add up in
another order than eager kernels, so a check reports the distance from them instead of asking for equal bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram

from fxamp.errors import ExportError

__all__ = ["write_aoti"]


def write_aoti(program: ExportedProgram, path: Path) -> None:
    """Compile *program* into the package *path*, whose name ends in ``.pt2``.

    Raises:
        ExportError: There is no compiler, or Inductor refuses the program.
    """
    settings = {"emulate_precision_casts": True}
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
    except Exception as error:
        raise ExportError(
            f"Inductor does not compile the program: {error}\n"
            "  it needs a C++ compiler (g++ or clang++); format='pt2' does without"
        ) from error
