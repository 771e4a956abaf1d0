"""The format ``pt2``: an ``ExportedProgram`` with the casts as nodes, for ``torch.export.load``.

The graph stands in a region with autocast off.  So the loaded program gives the same bits inside of an
ambient region, too, of whatever dtype.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxamp.errors import ExportError
from fxamp.export.deployed import Deployed

__all__ = ["exported", "write_pt2"]


def exported(deployed: Deployed, dynamic_shapes: Any) -> ExportedProgram:
    """*deployed* as torch's own export gives it.

    Args:
        deployed: The program.
        dynamic_shapes: As for ``torch.export.export``.

    Raises:
        ExportError: torch refuses the program, or a size that is to be dynamic is not.
    """
    try:
        with torch.no_grad():
            program = torch.export.export(
                deployed.module, deployed.args, deployed.kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        raise ExportError(f"torch.export refuses the program: {_advice(error)}") from error
    _drop_asserted_dtypes(program)
    return program


def _drop_asserted_dtypes(program: ExportedProgram) -> None:
    """Erase torch's assertions that a tensor has the dtype it had in the trace, one before each cast.

    The graph's dtypes do not depend on the caller's.  And torch's fake kernels do not know what autocast does
    inside of a fused kernel that runs in a region of its own, so what they assert of its result is wrong.
    """
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(
                op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
            ):
                module.graph.erase_node(node)
            module.recompile()


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """Write *program* to the file *path*.

    torch warns of each weight that is not contiguous (channels last, say): it does not see that such a one is
    all of its memory, takes it as it is, and saves it whole with its strides.
    """
    with path.open("wb") as stream, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No complete tensor found in the group")
        torch.export.save(program, stream)


def _advice(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if "Constraints violated" in text or "specialized" in text or "dynamic_shapes" in text:
        return f"{text}\n  give None for a size that the model fixes, or Dim.AUTO, which lets torch decide"
    if "pytree" in text or "register" in text:
        return f"{text}\n  register the class of the arguments or results: torch.export.register_dataclass"
    return text
