"""The table of kernels that consult autocast, against what kernels are seen to call.

A watcher stands on the CPU's autocast key for every operator that has a rule on any policy, and notes each
one that is called from inside the kernel of another operator with a floating argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fxamp.capture.recording_mode import RecordingMode
from fxamp.ir.operators import is_composite
from fxamp.policy import Policy
from fxamp.policy.reentrant import REENTRANT
from tests.conformance.cuda_policy_on_cpu import override
from tests.conformance.op_samples import OPERATORS, calls_of, unseeded
from tests.policy.probe import overload

RULES = {
    name
    for device, low in (("cpu", torch.bfloat16), ("cuda", torch.float16))
    for name in Policy.native(device, low).rules
}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

MATRIX = torch.diag(torch.tensor([3.0, 4.0, 5.0, 6.0])) + 0.5
LAYER = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "aten::linalg_pinv.atol_rtol_tensor": (MATRIX,),
    "aten::linalg_matrix_exp": (torch.stack([MATRIX, MATRIX / 9]),),
    "aten::linalg_polar": (MATRIX,),
    "aten::_linalg_det": (MATRIX,),
    "aten::_linalg_slogdet": (MATRIX,),
    "aten::affine_grid_generator": (torch.ones(2, 2, 3), [2, 1, 4, 4], False),
    "aten::_trilinear": (torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 3, 4), [], [], [], [2]),
    "aten::_sparse_addmm": (MATRIX, MATRIX.to_sparse(), MATRIX),
    "aten::_safe_softmax": (MATRIX, 0),
    "aten::ldexp.Tensor": (MATRIX, MATRIX),
    "aten::ldexp_": (MATRIX.clone(), MATRIX),
    "aten::ldexp.out": (MATRIX, MATRIX),
    "aten::mvlgamma": (MATRIX + 2, 2),
    "aten::mvlgamma_": (MATRIX + 2, 2),
    "aten::renorm_": (MATRIX.clone(), 2, 0, 1.0),
    "aten::multinomial": (MATRIX, 2),
    "aten::histogram.bin_ct": (MATRIX, 4),
    "aten::histogram.bins_tensor": (MATRIX, torch.arange(4.0)),
    "aten::_histogramdd_from_bin_cts": (MATRIX, [2, 2, 2, 2]),
    "aten::_histogramdd_from_bin_tensors": (MATRIX, [torch.arange(4.0)] * 4),
    "aten::_unsafe_masked_index_put_accumulate": (
        torch.ones(2), torch.tensor([True]), [torch.tensor([1])], torch.ones(1),
    ),
    "aten::roll": (MATRIX, [1], [0]),
    "aten::_chunk_cat": ([MATRIX, MATRIX], 0, 2),
    "aten::isin.Tensor_Tensor": (torch.arange(4.0), torch.arange(300.0)),
    "aten::unique_consecutive": (MATRIX, False, False, 0),
    "aten::unique_dim": (MATRIX, 0),
    "aten::_transformer_encoder_layer_fwd": (
        torch.ones(2, 3, 4), 4, 2,
        LAYER.self_attn.in_proj_weight, LAYER.self_attn.in_proj_bias,
        LAYER.self_attn.out_proj.weight, LAYER.self_attn.out_proj.bias,
        False, False, 1e-5,
        LAYER.norm1.weight, LAYER.norm1.bias, LAYER.norm2.weight, LAYER.norm2.bias,
        LAYER.linear1.weight, LAYER.linear1.bias, LAYER.linear2.weight, LAYER.linear2.bias,
    ),
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Any]] = {
    "aten::ldexp.out": {"out": torch.empty(4, 4)},
    "aten::histogram.bin_ct": {"density": True},
    "aten::histogram.bins_tensor": {"density": True},
    "aten::_histogramdd_from_bin_cts": {"density": True},
    "aten::_histogramdd_from_bin_tensors": {"density": True},
}


class Watcher:
    """Notes which operators with a rule are called from inside which kernel."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = defaultdict(set)
        self._outer: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all operators that are called meanwhile, in a region."""
        library = torch.library.Library("aten", "IMPL")
        try:
            for name in sorted(RULES):
                override(library, name, self._kernel(overload(name)))
            region = torch.autocast("cpu", torch.bfloat16)
            with region, enable_python_dispatcher(), RecordingMode(self._record):
                yield
        finally:
            library._destroy()

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Go into composites; below anything else, note what is called."""
        if is_composite(func) and func.name() not in RULES and not func._schema.is_mutable:
            with RecordingMode(self._record):
                return func._op_dk(COMPOSITE, *args, **kwargs)
        self._outer, before = func.name(), self._outer
        try:
            return func(*args, **kwargs)
        finally:
            self._outer = before

    def _kernel(self, op: OpOverload) -> Callable[..., Any]:
        name = op.name()

        def kernel(keys: object, *args: Any, **kwargs: Any) -> Any:
            if self._outer not in (None, name) and any(map(_is_castable, tree_leaves((args, kwargs)))):
                assert self._outer is not None
                self.seen[self._outer].add(name)
            with torch._C._ExcludeDispatchKeyGuard(BELOW):
                return op(*args, **kwargs)

        return kernel


def _is_castable(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


@pytest.mark.parametrize("name", sorted(REENTRANT))
def test_a_kernel_in_the_table_calls_what_its_row_says(name: str) -> None:
    if not torch._C._dispatch_has_kernel(name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    watcher = Watcher()
    with torch.no_grad(), watcher.watching():
        overload(name)(*EXAMPLES[name], **KEYWORDS.get(name, {}))
    called = {inner.removeprefix("aten::").partition(".")[0] for inner in watcher.seen[name]}
    told = set(REENTRANT[name].replace(",", " ").split())
    assert called <= told or "..." in told
    assert called & told


@pytest.mark.slow
@pytest.mark.opinfo
def test_no_kernel_outside_of_the_table_consults_autocast(count: Callable[[object], None]) -> None:
    watcher, calls = Watcher(), 0
    with unseeded():
        for name in sorted(OPERATORS):
            made = list(calls_of(name, torch.bfloat16, 6))
            calls += len(made)
            with watcher.watching():
                for call in made:
                    _attempt(call.function, call.args, call.kwargs)
    count(f"{calls} calls, {len(watcher.seen)} kernels consult autocast")
    kernels = {name for name in watcher.seen if name.startswith("aten::") and name not in RULES}
    assert {name for name in kernels if not is_composite(overload(name))} <= REENTRANT.keys()


def _attempt(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        function(*args, **kwargs)
    except Exception:  # noqa: BLE001  only what was called before counts
        return
