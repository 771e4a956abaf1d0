"""Counting dispatches without the arithmetic: products in low precision are skipped where nobody reads them.

What is dispatched depends on what tensors hold only where Python, or the shape of a result, does.  So a call
may be counted with zeros in the place of large products (a CPU without instructions for bfloat16 takes up to
a thousand times as long for them as in float32), if nothing that is made of such zeros is read.

* ``skipped_kernels`` puts the zeros in place, below all that counts: the dispatcher of the CPU gives them.
* ``UnreadValues`` follows them through a call, memory by memory, and raises where they are read: by an
  operator that reads values on the host or whose result has as many elements as the values say, by one from
  outside of ATen, and by ``tolist`` and NumPy.

A call that ``UnreadValues`` has let pass decides the same as with the products.  That is to be shown of the
model's Python in one call under eager autocast; converted and frozen it is the same Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ENOUGH", "ReadError", "Skipped", "UnreadValues", "skipped_kernels"]

ENOUGH = 1 << 16
"""Products of numbers from which on a kernel is skipped."""

_LOW = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_PRODUCTS: dict[Any, Callable[..., int]] = {
    # operator                     about how many products of numbers
    _aten.convolution.default:     lambda x, weight, *_: max(x.numel(), weight.shape[0]) * weight[0].numel(),
    _aten.mm.default:              lambda a, b: a.numel() * b.shape[-1],
    _aten.bmm.default:             lambda a, b: a.numel() * b.shape[-1],
    _aten.addmm.default:           lambda c, a, b, **_: a.numel() * b.shape[-1],
    _aten.baddbmm.default:         lambda c, a, b, **_: a.numel() * b.shape[-1],
}  # fmt: skip
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS_UNTOLD = frozenset(
    {"_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"}
)
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_WRITES_UNTOLD = (_aten.native_batch_norm.default,)  # to running statistics; its schema does not say so
_METHODS = ("tolist", "numpy", "__array__", "__dlpack__")


class ReadError(Exception):
    """A value was read that was not computed."""


class Skipped:
    """How many kernels were skipped.

    Attributes:
        kernels: The number.
    """

    def __init__(self) -> None:
        self.kernels = 0


@contextmanager
def skipped_kernels(enough: int = ENOUGH) -> Iterator[Skipped]:
    """Large products in low precision are zeros, on the CPU and in the whole process."""
    skipped = Skipped()
    library = torch.library.Library("aten", "IMPL")
    try:
        for func, products in _PRODUCTS.items():
            kernel = _kernel(func, products, skipped, enough)
            name = func.name().removeprefix("aten::")
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        yield skipped
    finally:
        library._destroy()


def _kernel(func: Any, products: Callable[..., int], skipped: Skipped, enough: int) -> Callable[..., Tensor]:
    computed = torch.library.get_kernel(func.name(), "CPU")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[1].dtype not in _LOW or products(*args, **kwargs) < enough:
            return computed.call_boxed(keys, *args, **kwargs)
        skipped.kernels += 1
        result = func(*pytree.tree_map(_without_values, args), **kwargs)
        return torch.zeros_like(result, device="cpu")

    return kernel


def _without_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class UnreadValues(TorchDispatchMode):
    """Follows what is made of the results of *skipped* kernels.

    Raises:
        ReadError: In a call under this mode, where that is read.
    """

    def __init__(self, skipped: Skipped) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._skipped = skipped
        self._unknown: set[StorageWeakRef] = set()
        self._patches = ExitStack()

    def __enter__(self) -> UnreadValues:  # noqa: PYI034  Self is not in Python 3.10
        for name in _METHODS:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._checked(getattr(Tensor, name))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **(kwargs or {}))
        unknown = [tensor for tensor in given if self._is_unknown(tensor)]
        if unknown and _reads(func, unknown):
            raise ReadError(f"{func} reads what was skipped")
        before = self._skipped.kernels
        result = func(*args, **(kwargs or {}))
        if unknown or self._skipped.kernels > before:
            self._note(pytree.tree_leaves(result))
            self._note(_written(func, args, kwargs or {}))
        return result

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_unknown(tensor):
                raise ReadError(f"{method.__name__} reads what was skipped")
            return method(tensor, *args, **kwargs)

        return checked

    def _is_unknown(self, tensor: Tensor) -> bool:
        return not self._unknown.isdisjoint(_memories(tensor))

    def _note(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._unknown.update(_memories(tensor))


def _reads(func: Any, unknown: list[Tensor]) -> bool:
    """Whether *func* may read *unknown* on the host, or for the shape of its result."""
    namespace, _, name = func.name().partition("::")
    if namespace not in ("aten", "prim", "prims") or name.partition(".")[0] in _READS_UNTOLD:
        return True
    if func in _INDEXED:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in unknown)
    return any(tag in func.tags for tag in _READS)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What *func* writes to, and perhaps more."""
    if func in _WRITES_UNTOLD:
        return pytree.tree_leaves((args, kwargs))
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    names = [argument.name for argument in func._schema.arguments if argument.is_write]
    return pytree.tree_leaves([given.get(name) for name in names])


def _memories(tensor: Tensor) -> list[StorageWeakRef]:
    """Which storages *tensor* is in; a sparse one is in those of its parts."""
    if tensor.layout is torch.sparse_coo:
        return [*_memories(tensor._indices()), *_memories(tensor._values())]
    if tensor.layout is not torch.strided:
        return [ref for part in _parts(tensor) for ref in _memories(part)]
    return [StorageWeakRef(tensor.untyped_storage())]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    raise ReadError(f"a tensor in the layout {tensor.layout}")
