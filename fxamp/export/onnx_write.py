"""A model as a file, or as a file and one of external data, its weights written one at a time.

A protobuf message ends at 2 GiB, so the weights of a larger model lie in a file beside it.  What the artifact
says about itself is added at the end of the model: two messages in a row are one with the fields of both.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from fxamp.export.artifact import Artifact
from fxamp.export.atomic import Pair

__all__ = ["LARGEST", "add_metadata", "save_copy", "weight_bytes", "write_model"]

LARGEST = 2**30 + 2**29
"""Bytes of weights that go into the model's own file; the limit of the format is 2 GiB for all of it."""

_SMALL = 2**10  # bytes: what shape inference wants to read stays in the model
_ALIGNED = 2**12  # bytes: so that a runtime can map a weight into memory


def weight_bytes(model: ir.Model) -> int:
    """What all weights of *model* take."""
    return sum(
        weight.const_value.nbytes for weight in model.graph.initializers.values() if weight.const_value
    )


def write_model(model: ir.Model, pair: Pair, *, external: bool) -> None:
    """Write *model*; its weights to the data file of *pair* if they are to be *external*.

    The model's weights are then those in the file: what they were made of can be freed.  A weight says its
    dtype and shape itself, so they are not said once more, but of one that the model gives.
    """
    if external:
        _write_data(model, pair.data)
    for weight in model.graph.initializers.values():
        if not weight.is_graph_output():
            weight.type, weight.shape = None, None
    ir.save(model, pair.model)


def save_copy(model: ir.Model, file: Path) -> None:
    """Write *model*, which was loaded from another file, to *file*; its external data beside it."""
    weights = model.graph.initializers.values()
    external = any(isinstance(weight.const_value, ir.ExternalTensor) for weight in weights)
    ir.save(model, file, external_data=f"{file.name}.data" if external else None)


def _write_data(model: ir.Model, path: Path) -> None:
    with path.open("r+b") as stream:  # it is there, and locked
        for name, weight in model.graph.initializers.items():
            tensor = weight.const_value
            if tensor is None or tensor.nbytes <= _SMALL:
                continue
            start = stream.seek(-(-stream.tell() // _ALIGNED) * _ALIGNED)
            stream.write(memoryview(tensor.tobytes()))
            weight.const_value = ir.ExternalTensor(
                path.name, start, stream.tell() - start, tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=path.parent,
            )  # fmt: skip


def add_metadata(path: Path, artifact: Artifact) -> None:
    """Put what *artifact* says into the model in the file *path*."""
    entries = [onnx.StringStringEntryProto(key=k, value=v) for k, v in artifact.to_entries().items()]
    with path.open("ab") as stream:
        stream.write(onnx.ModelProto(metadata_props=entries).SerializeToString())
        stream.flush()
        os.fsync(stream.fileno())
