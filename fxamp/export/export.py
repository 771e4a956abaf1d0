"""``export``: from a model to a file that other runtimes load, in half the bytes."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from fxamp.api import convert
from fxamp.capture.symbols import Sizes
from fxamp.capture.tracer_checks import exporter_seen
from fxamp.errors import ArgumentError, ExportError, FxampError
from fxamp.export.aoti import write_aoti
from fxamp.export.artifact import Artifact, add_to_archive
from fxamp.export.atomic import atomically
from fxamp.export.check import differences, distance, run_in_fresh_process
from fxamp.export.contract import Contract, InputDtypes, OutputDtypes
from fxamp.export.deployed import Deployed, deploy
from fxamp.export.describe import describe
from fxamp.export.fitted import Fit, check_fit, fitted
from fxamp.export.needs import needed_imports
from fxamp.export.onnx import require_packages, without_fused_attention, write_onnx
from fxamp.export.pt2 import exported, write_pt2
from fxamp.export.size_one import refuse_other_ones
from fxamp.policy import Policy
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.freeze import freeze
from fxamp.runtime.frozen_module import FrozenModule

__all__ = ["Format", "export"]

Format = Literal["pt2", "aoti", "onnx"]

_BY_ENDING = {".pt2": "pt2", ".onnx": "onnx"}


def export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    format: Format | None = None,  # noqa: A002  the name that users know
    dtype: torch.dtype | None = None,
    device_type: str | None = None,
    policy: Policy | None = None,
    dynamic_shapes: Any = None,
    inputs: InputDtypes = "keep",
    outputs: OutputDtypes = "autocast",
    fit: Fit = "warn",
    check: bool = True,
) -> Artifact:
    """Write *model* for deployment: the graph with every cast, each weight in the dtype that it is used in.

    What is written is the model in evaluation mode, without gradients.  The file is complete or is not there:
    it is written beside its final name, checked, and renamed.

    Args:
        model: A model, a converted or a frozen one.
        args: Positional arguments of a typical call.
        kwargs: Keyword arguments of it.  May be left out: ``export(model, args, path)``.
        path: The file to write.
        format: ``"pt2"`` for ``torch.export.load``, ``"aoti"`` for ``torch._inductor.aoti_load_package`` and
            C++, ``"onnx"`` for ONNX runtimes; by default as the ending of *path* says.
        dtype: The low precision dtype; as for :func:`fxamp.convert`, like the next two.
        device_type: Whose autocast.
        policy: Which operators are cast.
        dynamic_shapes: Which sizes may differ from the example's, as for ``torch.export.export``.
        inputs: ``"keep"``: as in the example.  ``"low"``: what is float32 there is taken in *dtype*.
        outputs: ``"autocast"``: as the model gives them under autocast.  ``"keep"``: as without it.
            ``"low"``: what is float32 under autocast is given in *dtype*.
        fit: What to do about weights and constants that *dtype* does not have (a mask of -1e9, an eps of
            1e-12): ``"warn"``, ``"error"``, or ``"clamp"``, which makes them the nearest that it has.
        check: Load what was written in a fresh process, which cannot import fxamp, and run the example.  A
            program of pt2 must give the bits of the converted model; for the other formats, whose kernels
            are not torch's, the distance is measured and told.

    Returns:
        What the artifact says about itself; :func:`read_artifact` and ``fxamp show`` read it from the file.

    Raises:
        ArgumentError: An argument does not fit.
        ExportError: The model is no single graph, the format refuses it, a package is missing, the file
            cannot be written, or the check fails.  What was under *path* before is still there.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/linear.pt2"
        >>> linear, x = nn.Linear(4, 2), torch.ones(3, 4)
        >>> artifact = export(linear, (x,), path, dtype=torch.bfloat16, device_type="cpu")
        >>> artifact.weight_bytes
        20
        >>> torch.export.load(path).module()(x).dtype
        torch.bfloat16
    """
    check_fit(fit)
    request = _request(model, kwargs, path, format, Contract(inputs, outputs), dynamic_shapes, check=check)
    call = tuple(args), dict(request.kwargs)
    if request.format == "onnx":
        require_packages(check=check)
    with without_fused_attention() if request.format == "onnx" else nullcontext():
        frozen = _frozen(model, call, request, device_type=device_type, dtype=dtype, policy=policy)
        settled = _settle(frozen, call)
        original = None
        if not _is_one_graph(frozen, call):
            with exporter_seen(), suppress(FxampError):  # else what the model itself does is told
                again = _frozen(model, call, request, device_type=device_type, dtype=dtype, policy=policy)
                if _is_one_graph(again, call):
                    original, frozen = frozen, again
        deployed = deploy(frozen, *call, request.contract)
        deployed = replace(deployed, original=original, settled=settled and original is None)
        return _written(fitted(deployed, _weights(model), fit), request)


@dataclass(frozen=True)
class _Request:
    kwargs: Mapping[str, Any]
    path: Path
    format: Format
    contract: Contract
    dynamic_shapes: Any
    check: bool


def _request(
    model: object,
    kwargs: Any,
    path: Any,
    format: Any,  # noqa: A002
    contract: Contract,
    dynamic_shapes: Any,
    *,
    check: bool,
) -> _Request:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"export takes an nn.Module, not {type(model).__name__}")
    if path is None and isinstance(kwargs, (str, os.PathLike)):
        kwargs, path = None, kwargs
    if path is None:
        raise ArgumentError("export needs the file to write:  fxamp.export(model, args, 'model.pt2')")
    file = Path(path)
    chosen: Any = format or _BY_ENDING.get(file.suffix)
    if chosen not in get_args(Format):
        told = f"format={format!r}" if format else f"the ending {file.suffix!r} of {file}"
        raise ArgumentError(f"{told} names no format\n  format= is one of {', '.join(get_args(Format))}")
    if chosen != "onnx" and file.suffix != ".pt2":
        raise ArgumentError(f"torch loads files that end in .pt2 only, not {file.name}")
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else f"is in a folder that is not there: {file.parent}"
        raise ArgumentError(f"{file} {what}\n  name a file in a folder that exists")
    return _Request(dict(kwargs or {}), file, chosen, contract, dynamic_shapes, check)


def _settle(frozen: FrozenModule, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Call a model that sets attributes as a first call does (fills a cache), so that it has been called.

    Returns:
        Whether that was so.
    """
    frozen.capture(*call[0], **call[1])
    runner = frozen._runner
    if runner.last is not None or not any(failure.passing for failure in runner.failures.values()):
        return False
    buffers = {name: buffer.clone() for name, buffer in frozen.named_buffers()}
    args, kwargs = copy.deepcopy(call)
    with torch.random.fork_rng(), torch.no_grad(), suppress(Exception):  # what it raises is told later
        frozen(*args, **kwargs)
        for name, buffer in frozen.named_buffers():
            buffer.copy_(buffers[name])
    return True


def _is_one_graph(frozen: FrozenModule, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether *call* is; else values of tensors decide what runs, or a part runs eagerly."""
    frozen.capture(*call[0], **call[1])
    program = frozen._runner.last
    return program is not None and program.operator is None


def _frozen(
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    request: _Request,
    *,
    device_type: str | None,
    dtype: torch.dtype | None,
    policy: Policy | None,
) -> FrozenModule:
    """*model*, frozen, with the sizes symbolic that are to be."""
    shapes = request.dynamic_shapes
    sizes = Sizes.FIXED if shapes is None else Sizes.LEADING
    if isinstance(model, (AmpModule, FrozenModule)):
        if (device_type, dtype, policy) != (None, None, None):
            raise ArgumentError(
                "a converted model has its precision: leave device_type, dtype and policy out"
            )
        if isinstance(model, FrozenModule):
            options = replace(model._options, sizes=sizes, dynamic_shapes=shapes, whole_loops=False)
            return FrozenModule(model._tree, options, model._unfolded)
        asked, function = replace(model._asked, sizes=sizes, dynamic_shapes=shapes), model._function
    else:
        amp = convert(
            model,
            device_type=device_type,
            dtype=dtype,
            policy=policy,
            dynamic_shapes=False if shapes is None else shapes,
        )
        asked, function = amp._asked, amp._function
    try:
        return freeze(AmpModule(function, replace(asked, whole_loops=False)), *call)
    except FxampError:
        raise
    except Exception as error:  # of a model that is run to freeze it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(
            f"{type(model).__name__} is no single graph, and does not run in pieces: {reason}\n"
            "  call the converted model like this to see where:  fxamp.convert(model)(*args, **kwargs)"
        ) from error


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The float32 weights by name; a frozen model has those only that it did not round."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in named if tensor.dtype is torch.float32}


def _written(deployed: Deployed, request: _Request) -> Artifact:
    if request.format == "onnx":
        artifact = describe(deployed, "onnx")
        return write_onnx(deployed, artifact, request.path, request.dynamic_shapes, check=request.check)
    program = exported(deployed, request.dynamic_shapes)
    refused = refuse_other_ones(program, deployed) if request.dynamic_shapes is not None else ()
    artifact = describe(deployed, request.format, needed_imports(program))
    artifact = replace(artifact, notes=(*artifact.notes, *refused))
    with atomically(request.path, size=artifact.weight_bytes) as file:
        (write_pt2 if request.format == "pt2" else write_aoti)(program, file)
        if request.check:
            artifact = replace(artifact, check=_checked(deployed, artifact, file))
        add_to_archive(file, artifact)
    return artifact


def _checked(deployed: Deployed, artifact: Artifact, file: Path) -> str:
    """What a fresh process finds.

    Raises:
        ExportError: A pt2 program gives other bits.
    """
    got = run_in_fresh_process(
        file,
        (deployed.args, deployed.kwargs),
        format=artifact.format,
        device_type=deployed.device_type,
        imports=artifact.imports,
    )
    wanted = deployed.reference()
    found = differences(got, wanted)
    if not found:
        return "the same bits in a fresh process"
    if artifact.format == "pt2":
        what, way_out = _EXPORTERS_WAY if _is_exporters_way(deployed, got) else _FAULT
        raise ExportError(f"{what}:\n  " + "\n  ".join(found) + f"\n  {way_out}; check=False writes the file")
    return distance(got, wanted)


_FAULT = (
    "the artifact gives other bits in a fresh process than the converted model here",
    "a fault of fxamp or of torch's exporter: please report it",
)
_EXPORTERS_WAY = (
    "the model reads values of tensors, and the way that it has for exporters gives other bits than it does",
    "that way is the model's own: write it so that both do the same, or decide with tensors (torch.where)",
)


def _is_exporters_way(deployed: Deployed, got: list[Any]) -> bool:
    """Whether the artifact does what the model does where it sees an exporter."""
    return deployed.original is not None and not differences(got, deployed.of_graph())
