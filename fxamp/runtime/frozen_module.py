"""The frozen model: an inference-only module that stores each weight in the precision it is used in."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp.errors import FrozenError
from fxamp.ir.regions import Region
from fxamp.ir.rounded_weight import RoundedWeight
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.copy_tree import copy_tree
from fxamp.runtime.frozen_runner import FrozenRunner
from fxamp.runtime.frozen_weights import FrozenWeights
from fxamp.runtime.options import Options
from fxamp.runtime.packed_weights import Prepacked
from fxamp.runtime.prepack import Packing

__all__ = ["FrozenModule"]

_LOG = logging.getLogger("fxamp")
_NARROW = (torch.float16, torch.bfloat16)


class FrozenModule(nn.Module):
    """What ``torch.autocast`` gives under ``torch.no_grad()``, with no weight cast in a call.

    Made by :func:`fxamp.freeze`.  It stands alone: it shares nothing with the model that it was made from,
    and its module tree is out of reach, so its weights change by ``load_state_dict`` and ``to(device)``
    only.

    ``state_dict`` has the model's own names.  A weight that calls only ever round is there in its low
    precision dtype; every other one in its own dtype.  ``load_state_dict`` takes such a dict or one of the
    float32 model, whose weights it rounds.  A weight that is stored both ways is in the dict once, in
    float32; its rounded copy is made anew when it is loaded.

    A call never records gradients: it is run as under ``torch.no_grad()`` (or in inference mode, where that
    is on) whatever the mode.
    """

    _tree: nn.Module
    _options: Options
    _unfolded: frozenset[str]
    _packing: Packing | None
    _region: Region
    _weights: FrozenWeights
    _runner: FrozenRunner

    def __init__(
        self,
        tree: nn.Module,
        options: Options,
        unfolded: frozenset[str] = frozenset(),
        packing: Packing | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        self.__dict__["_tree"] = tree  # no child: nobody is to find its modules
        self.__dict__["_options"] = options
        self.__dict__["_unfolded"] = unfolded
        self.__dict__["_packing"] = packing
        policy = options.policy
        self.__dict__["_region"] = Region(policy.device_type, enabled=True, dtype=policy.low)
        self._begin()

    def _begin(self) -> None:
        """Forget all programs."""
        named = self._tree.named_parameters(remove_duplicate=False)
        unfolded = frozenset(id(weight) for name, weight in named if name in self._unfolded)
        weights = FrozenWeights(unfolded, self._packing)
        self.__dict__["_weights"] = weights
        self.__dict__["_runner"] = FrozenRunner(self._tree, "", self._options, weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives under ``torch.autocast`` and ``torch.no_grad()``, bit for bit.

        Raises:
            FrozenError: An input requires grad while gradients are recorded, or the call needs a float32
                weight of which only the rounded copy is kept.
        """
        if torch.compiler.is_compiling():
            return self._trace(args, kwargs)
        if not torch.is_grad_enabled():
            return self._runner(args, kwargs, self._region)
        _refuse_gradients(args, kwargs)
        with torch.no_grad():
            return self._runner(args, kwargs, self._region)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What Dynamo sees: a program that is there already; else a call that it does not look into."""
        device_type = self._region.device_type
        for program in self._runner.traceables:
            leaves = program.leaves(args, kwargs)
            if leaves is None:
                continue
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False), torch.no_grad():
                    return program(leaves)
            with torch.no_grad():
                return program(leaves)
        return self._call_untraced(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call_untraced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the program for a call without running it."""
        with torch.no_grad():
            self._runner.capture(args, kwargs, self._region)

    # What was decided is told in the same words; these ask the runner.
    graph_module = vars(AmpModule)["graph_module"]
    graph_modules = vars(AmpModule)["graph_modules"]
    eager_modules = vars(AmpModule)["eager_modules"]
    report = vars(AmpModule)["report"]

    @property
    def prepacked(self) -> tuple[Prepacked, ...]:
        """Which weights are read packed in which calls, and why others are not; ``()`` for ``prepack="off"``.

        Packed copies belong to the machine: they are made in the first calls, and are in no copy, pickle or
        ``state_dict``.
        """
        return self._weights.prepacked()

    # --- what does not go ---------------------------------------------------------------------------

    def train(self, mode: bool = True) -> FrozenModule:  # noqa: FBT001, FBT002
        """Do nothing for ``train(False)``.

        Raises:
            FrozenError: *mode* is true.
        """
        if mode:
            raise FrozenError(
                "a frozen module cannot be trained\n  train the model it was made from, and freeze again"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> FrozenModule:  # noqa: FBT001, FBT002
        """Do nothing for ``requires_grad_(False)``.

        Raises:
            FrozenError: *requires_grad* is true.
        """
        return self.train(requires_grad)

    # --- the weights --------------------------------------------------------------------------------

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, Any]]:
        """The weights as they are stored, by the model's own names."""
        for name, weight in self._tree.named_parameters(prefix, recurse, remove_duplicate):
            yield name, _stored(weight)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers, by the model's own names."""
        return self._tree.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``state_dict``, with each weight in the dtype that it is stored in."""
        state = self._tree.state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, RoundedWeight):
                state[name] = value.low
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Copy *state_dict*, of a frozen module or of the float32 model, into the weights and buffers.

        What is stored in low precision is rounded from float32, as autocast would round it in every call.

        Raises:
            FrozenError: *assign* is true, or a weight that is needed in float32 comes in less than that.
            RuntimeError: As ``nn.Module.load_state_dict``: names or shapes do not fit.
        """
        if assign:
            raise FrozenError("a frozen module copies what it loads: leave assign=True out")
        rounded = self._check_precision(state_dict)
        try:
            with torch.inference_mode(mode=False):
                result = self._tree.load_state_dict(state_dict, strict)
        finally:  # it copies what fits before it raises
            self._weights.refresh()
        if rounded:
            _LOG.info("load_state_dict rounded %d weights to %s", rounded, self._options.policy.low)
        return result

    def _check_precision(self, state_dict: Mapping[str, Any]) -> int:
        """How many weights are rounded when *state_dict* is loaded."""
        rounded = 0
        for name, weight in self._tree.state_dict().items():
            value = state_dict.get(name)
            if not isinstance(value, torch.Tensor) or not isinstance(weight, torch.Tensor):
                continue
            if isinstance(weight, RoundedWeight):
                rounded += value.dtype is not weight.low.dtype
            elif weight.dtype in (torch.float32, torch.float64) and value.dtype in _NARROW:
                raise FrozenError(
                    f"{name!r} is needed in {weight.dtype}, and the state dict has it in {value.dtype}\n"
                    "  load the float32 state dict; if these are all the bits there are, load value.float()"
                )
        return rounded

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        below = [name for name in state_dict if name.startswith(prefix)]
        own = {name.removeprefix(prefix): state_dict[name] for name in below}
        try:
            missing, unexpected = self.load_state_dict(own, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [f"{prefix}{name}" for name in missing]
        unexpected_keys += [f"{prefix}{name}" for name in unexpected]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FrozenModule:  # noqa: FBT001, FBT002
        """Apply *fn* to what is stored; the tree is copied with the results in place.

        Raises:
            FrozenError: It changes a dtype.
        """
        applied: dict[int, torch.Tensor] = {}
        for tensor in (*self._tree.parameters(), *self._tree.buffers()):
            applied[id(tensor)] = _applied(fn, tensor)
        stored = (*self._tree.parameters(), *self._tree.buffers())
        if any(applied[id(tensor)] is not tensor for tensor in stored):
            self.__dict__["_tree"] = copy_tree(self._tree, applied)
            self._begin()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenModule:
        copied = FrozenModule(copy.deepcopy(self._tree, memo), self._options, self._unfolded, self._packing)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenModule, (self._tree, self._options, self._unfolded, self._packing)

    def extra_repr(self) -> str:
        """The policy, and how many bytes the weights take."""
        weights = [*self.parameters(), *self._weights.copies(), *self._weights.derived()]
        total, packed = sum(weight.nbytes for weight in weights), self._weights.packed_bytes()
        beside = f", packed beside them: {packed:,} bytes" if self._packing is not None else ""
        return f"policy={self._options.policy}, weights: {total:,} bytes{beside}"


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.low if isinstance(tensor, RoundedWeight) else tensor


def _applied(fn: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    """What *fn* makes of *tensor*, or of what it stores."""
    stored = _stored(tensor)
    with torch.inference_mode(mode=False), torch.no_grad():
        result: torch.Tensor = fn(stored)
    if result.dtype is not stored.dtype:
        raise FrozenError(
            f"a frozen module keeps the dtypes it stores; this would make {result.dtype} of {stored.dtype}\n"
            "  to(device) is fine; for another precision convert and freeze the float32 model again"
        )
    if result is stored:
        return tensor
    if isinstance(tensor, RoundedWeight):
        return RoundedWeight(result, requires_grad=tensor.requires_grad)
    return nn.Parameter(result, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result


def _refuse_gradients(args: Any, kwargs: Any) -> None:
    for value in pytree.tree_leaves((args, kwargs)) if kwargs or not _are_tensors(args) else args:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise FrozenError(
                "an input requires grad, and a frozen module records no gradients\n"
                "  call it under torch.no_grad(), pass input.detach(), or use the model it was made from"
            )


def _are_tensors(args: tuple[Any, ...]) -> bool:
    return all(isinstance(arg, torch.Tensor) for arg in args)
