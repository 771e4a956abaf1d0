"""The result of a loop over time, however long it is: that of one step, along a sequence of any length.

A fake tensor has no kernel, so the dispatcher would take the loop apart and bind the graph to the length of
the example.  One step of it tells the dtypes, the shapes and the place in the gradient just as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from fxamp.ir.regions import Region
from fxamp.policy.time_loops import TIME_LOOPS

__all__ = ["is_time_loop", "loop_on_fakes"]

_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)


def is_time_loop(func: OpOverload, args: tuple[Any, ...], region: Region) -> bool:
    """Whether *func*, called with *args* in *region*, would loop over time in C++ on the CPU.

    oneDNN has ``lstm.input`` as one operator, if it is switched on and the state is not projected
    (``use_mkldnn`` in aten/src/ATen/native/RNN.cpp).
    """
    if func.name() not in TIME_LOOPS or region.device_type != "cpu" or args[0].device.type != "cpu":
        return False
    if func.name() != "aten::lstm.input":
        return True
    hidden, cell = args[1]
    is_projected = hidden.shape[2] != cell.shape[2]
    return is_projected or args[0].dtype not in _ONEDNN or not torch._C._get_mkldnn_enabled()


def loop_on_fakes(func: OpOverload, args: tuple[Any, ...], call: Callable[..., Any]) -> tuple[Any, ...]:
    """What *func* gives for fake tensors: the sequence, and the last states.

    Args:
        func: An operator of :data:`TIME_LOOPS`.
        args: What it is called with.
        call: Calls an operator on fake tensors: ``call(func, args, kwargs)``.
    """
    if func._overloadname == "data":
        data, _, state, *rest = args
        rows = state[0].shape[1] if isinstance(state, (list, tuple)) else state.shape[1]
        step = data[:1].unsqueeze(0).expand(1, rows, data.shape[1])
        first, *last = call(func.overloadpacket.input, (step, state, *rest, False), {})
        return _repeated(first[0, :1], (data.shape[0], first.shape[2])), *last
    sequence, state, *rest, batch_first = args
    over_time = sequence.transpose(0, 1) if batch_first else sequence
    first, *last = call(func, (over_time[:1], state, *rest, False), {})
    every = _repeated(first, (over_time.shape[0], *first.shape[1:]))
    return every.transpose(0, 1) if batch_first else every, *last


def _repeated(first: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    """A new tensor, for ``cat`` and ``stack`` of the steps make one."""
    return first.expand(shape).clone(memory_format=torch.contiguous_format)
