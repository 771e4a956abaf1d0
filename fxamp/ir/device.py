"""A device as three figures: how fast it moves bytes, starts kernels and multiplies matrices.

The time of a kernel is the longest of the three (the roofline model, with the start as a floor).  That is a
model: it tells where mixed precision pays, and about by how much, not what a profiler would show.

Bandwidths and rates below are the vendors' peaks for dense matrices; ``LAUNCH`` is an assumption.  What a
machine really reaches, :func:`measure` finds out on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fxamp.errors import ArgumentError

__all__ = ["DEVICES", "LAUNCH", "Device", "measure"]

LAUNCH = 4e-6
"""Seconds from one kernel to the next in eager PyTorch where the GPU waits for the host; assumed for all."""


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know.

    Attributes:
        name: For people.
        bandwidth: Bytes a second between memory and kernels.
        launch: Seconds that a kernel takes at the least.
        rates: For each dtype the floating point operations a second of matrix products in it; a dtype that
            is not there is multiplied at the rate of float32.
        source: Where the figures are from.
    """

    name: str
    bandwidth: float
    launch: float
    rates: Mapping[torch.dtype, float]
    source: str

    def seconds(self, bytes_moved: float, flops: float, dtype: torch.dtype) -> float:
        """The time of one kernel that moves so many bytes and multiplies matrices of *dtype*."""
        rate = self.rates.get(dtype, self.rates.get(torch.float32, float("inf")))
        return max(self.launch, bytes_moved / self.bandwidth, flops / rate)


def _gpu(
    name: str, bandwidth: float, half: float, single: float, *, source: str, bf16: bool = True
) -> Device:
    rates = {torch.float16: half, torch.float32: single} | ({torch.bfloat16: half} if bf16 else {})
    return Device(name, bandwidth, LAUNCH, MappingProxyType(rates), source)


# Each figure was compared with the pages in its row, which quote NVIDIA (read in December 2026); a rate that
# is published for sparse matrices only is halved.  "GCP" is the table of GPUs of Google Cloud, as quoted at
# huggingface.co/spaces/Elfsong/gcp_allocator.
# fmt: off
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "T4": _gpu(
            "T4", 320e9, 65e12, 8.1e12, bf16=False,
            source="320 GB/s, 65 and 8.1 TFLOPS: sysrqmts.com/en/gpus/nvidia/tesla/t4; 320 and 8.1: GCP",
        ),
        "V100": _gpu(
            "V100 SXM2", 900e9, 125e12, 15.7e12, bf16=False,
            source="900 GB/s, 15.7 TFLOPS: GCP; 125: developer.nvidia.com/programming-tensor-cores-cuda-9-0",
        ),
        "A100": _gpu(
            "A100 80GB SXM", 2039e9, 312e12, 19.5e12,
            source="2,039 GB/s, 312 and 19.5 TFLOPS: NVIDIA A100 datasheet, "
            "quoted at glennklockwood.com/garden/processors/A100",
        ),
        "L4": _gpu(
            "L4", 300e9, 121e12, 30.3e12,
            source="300 GB/s and 30.3 TFLOPS: GCP; 242 with sparsity: grokipedia.com/page/NVIDIA_L4_vs_L40S",
        ),
        "H100": _gpu(
            "H100 SXM", 3.35e12, 989.4e12, 66.9e12,
            source="3.35 TB/s, 989.4 and 66.9 TFLOPS: glennklockwood.com/garden/processors/h100; "
            "1,979 with sparsity and 67 on archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
        ),
        "H200": _gpu(
            "H200 SXM", 4.8e12, 989.4e12, 66.9e12,
            source="4.8 TB/s, the chip of the H100: aiminingco.com/gpu/h200/specs",
        ),
    }
)
# fmt: on
"""float32 rates are without TF32, as in PyTorch by default."""


def measure(device_type: str = "cpu", *, size: int = 1024, rounds: int = 5) -> Device:
    """The figures of this machine, measured in a few seconds with the present number of threads.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        size: Rows and columns of the matrices that are multiplied.
        rounds: How often each is timed; the median counts.

    Raises:
        ArgumentError: *size* or *rounds* is not positive.
    """
    if size < 1 or rounds < 1:
        raise ArgumentError(f"size and rounds are at least 1, not {size} and {rounds}")
    small = torch.ones(8, device=device_type)
    large = torch.ones(2**24, device=device_type)  # 64 MiB: larger than most caches
    target = torch.empty_like(large)
    launch = _time(lambda: small + small, device_type, rounds, repeats=200)
    copy = _time(lambda: target.copy_(large), device_type, rounds)
    rates: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        matrix = torch.ones(size, size, device=device_type, dtype=dtype)
        rates[dtype] = 2 * size**3 / _time(lambda m=matrix: m @ m, device_type, rounds)  # type: ignore[misc]
    moved = 2 * large.numel() * large.element_size()
    source = f"measured, {torch.get_num_threads()} threads" if device_type == "cpu" else "measured"
    return Device(device_type, moved / copy, launch, MappingProxyType(rates), source)


def _time(run: Callable[[], object], device_type: str, rounds: int, repeats: int = 1) -> float:
    wait = getattr(getattr(torch, device_type), "synchronize", lambda: None)
    seconds = []
    for _ in range(rounds + 1):  # the first one warms up
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        seconds.append((time.perf_counter() - start) / repeats)
    return statistics.median(seconds[1:])
