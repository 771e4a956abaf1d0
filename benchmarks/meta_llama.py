"""How long and how much memory does it take to convert a model of 70 billion parameters without its weights?

A model of Llama-3-70B's shape is made on the meta device and converted for CUDA, with 20, 40 and 80 layers in
processes of their own.  The time of a layer should not depend on how many there are.

    python benchmarks/meta_llama.py [--layers 20 40 80] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import fxamp

WIDTH, HIDDEN, HEADS, GROUPS, WORDS = 8192, 28672, 64, 8, 128256  # Llama 3 70B
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    """RMSNorm, computed in float32 as the Llama models in the libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions."""
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat((-right, left), -1) * sine


class Block(nn.Module):
    """Attention with grouped keys, and the gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = Norm(), Norm()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        batch, length, _ = x.shape
        h = self.norm(x)
        q, k, v = (
            layer(h).view(batch, length, -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        h = self.after(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, length)`` to ``(batch, length, words)``."""
        x = self.embed(tokens)
        rates = 500000.0 ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        for block in self.blocks:
            x = block(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        logits: Tensor = self.head(self.norm(x))
        return logits


def measure(layers: int) -> dict[str, Any]:
    """Convert once in this process."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Llama(layers).eval()
        tokens = torch.zeros(1, 16, dtype=torch.long)
    fxamp.convert(nn.Linear(2, 2), (torch.ones(1, 2),), dtype=torch.bfloat16)  # imports
    start = time.perf_counter()
    amp = fxamp.convert(model, (tokens,), device_type="cuda", dtype=torch.bfloat16)
    seconds = time.perf_counter() - start
    return {
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": len(amp.report().operators),
        "seconds": round(seconds, 2),
        "seconds a layer": round(seconds / layers, 4),
        "peak GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "graphs": len(amp.graph_modules),
        "eager": len(amp.eager_modules),
    }


def main() -> None:
    """Measure each size in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for layers in options.layers:
        command = [sys.executable, __file__, "--one", str(layers)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
