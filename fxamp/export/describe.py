"""What is told of a deployed program: versions, dtypes, counts and the precision plan."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from fxamp.export.artifact import Artifact
from fxamp.export.deployed import Deployed
from fxamp.ir.operators import is_to_dtype
from fxamp.policy.plan import Plan
from fxamp.runtime.planning import planned
from fxamp.version import __version__

__all__ = ["describe"]


def describe(deployed: Deployed, format: str, imports: Sequence[str] = ()) -> Artifact:  # noqa: A002
    """What the artifact of *deployed* says about itself, but for the check."""
    calls = [node for node in deployed.graph_module.graph.nodes if node.op == "call_function"]
    casts = [node for node in calls if is_to_dtype(node)]
    graphs = planned(deployed.program)
    tensors = _stored(deployed.graph_module)
    return Artifact(
        format=format,
        model=type(deployed.frozen._tree).__name__,
        fxamp=__version__,
        torch=torch.__version__,
        device_type=deployed.device_type,
        dtype=str(deployed.low).removeprefix("torch."),
        inputs=deployed.inputs,
        outputs=deployed.outputs,
        casts=len(casts),
        operators=sum(isinstance(node.target, OpOverload) for node in calls) - len(casts),
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        float32_bytes=sum(_float32_bytes(weight) for weight in deployed.frozen._tree.parameters()),
        imports=tuple(imports),
        findings=deployed.findings,
        notes=deployed.notes,
        policy=json.loads(Plan(torch.__version__, deployed.frozen._options.policy.to_json(), ()).to_json()),
        precision=tuple(str(operator) for graph in graphs for operator in graph.operators if operator.rule),
    )


def _stored(module: GraphModule) -> list[torch.Tensor]:
    tensors = [*module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _float32_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * (4 if weight.is_floating_point() else weight.element_size())
