"""Layers and models of torch_geometric that need no compiled extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

Make = Callable[[Any], nn.Module]
_WIDTH = 16

# name: how it is made from ``torch_geometric.nn``, and what it is called with besides nodes and edges
_LISTED: dict[str, tuple[Make, str]] = {
    "GCNConv": (lambda g: g.GCNConv(_WIDTH, 8), ""),
    "GCNConv-weighted": (lambda g: g.GCNConv(_WIDTH, 8), "weights"),
    "GATConv": (lambda g: g.GATConv(_WIDTH, 8, heads=2, dropout=0.2), ""),
    "GATv2Conv": (lambda g: g.GATv2Conv(_WIDTH, 8, heads=2), ""),
    "SAGEConv": (lambda g: g.SAGEConv(_WIDTH, 8), ""),
    "SAGEConv-max": (lambda g: g.SAGEConv(_WIDTH, 8, aggr="max"), ""),
    "GraphConv": (lambda g: g.GraphConv(_WIDTH, 8), ""),
    "GINConv": (lambda g: g.GINConv(nn.Sequential(nn.Linear(_WIDTH, 8), nn.ReLU(), nn.Linear(8, 8))), ""),
    "GINEConv": (lambda g: g.GINEConv(nn.Linear(_WIDTH, 8), edge_dim=4), "features"),
    "ChebConv": (lambda g: g.ChebConv(_WIDTH, 8, K=3), ""),
    "TAGConv": (lambda g: g.TAGConv(_WIDTH, 8), ""),
    "SGConv": (lambda g: g.SGConv(_WIDTH, 8, K=2), ""),
    "APPNP": (
        lambda g: g.Sequential("x, e", [(nn.Linear(_WIDTH, 8), "x -> x"), (g.APPNP(3, 0.1), "x, e -> x")]),
        "",
    ),
    "ARMAConv": (lambda g: g.ARMAConv(_WIDTH, 8, num_stacks=2), ""),
    "TransformerConv": (lambda g: g.TransformerConv(_WIDTH, 8, heads=2, edge_dim=4), "features"),
    "GatedGraphConv": (lambda g: g.GatedGraphConv(_WIDTH, 2), ""),
    "ResGatedGraphConv": (lambda g: g.ResGatedGraphConv(_WIDTH, 8), ""),
    "LEConv": (lambda g: g.LEConv(_WIDTH, 8), ""),
    "FeaStConv": (lambda g: g.FeaStConv(_WIDTH, 8, heads=2), ""),
    "FiLMConv": (lambda g: g.FiLMConv(_WIDTH, 8), ""),
    "PNAConv": (
        lambda g: g.PNAConv(
            _WIDTH, 8, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([0, 3, 5, 2])
        ),
        "",
    ),
    "RGCNConv": (lambda g: g.RGCNConv(_WIDTH, 8, 3), "relations"),
    "NNConv": (lambda g: g.NNConv(_WIDTH, 8, nn.Linear(4, _WIDTH * 8)), "features"),
    "EdgeConv": (lambda g: g.EdgeConv(nn.Linear(2 * _WIDTH, 8)), ""),
    "GeneralConv": (lambda g: g.GeneralConv(_WIDTH, 8), ""),
    "GPSConv": (lambda g: g.GPSConv(_WIDTH, g.SAGEConv(_WIDTH, _WIDTH), heads=2), ""),
    "GCN": (lambda g: g.GCN(_WIDTH, 8, 2, dropout=0.2), ""),
    "GIN": (lambda g: g.GIN(_WIDTH, 8, 2, jk="cat"), ""),
    "GraphSAGE": (lambda g: g.GraphSAGE(_WIDTH, 8, 2, norm="batch_norm"), ""),
    "GAT": (lambda g: g.GAT(_WIDTH, 8, 2), ""),
    "PNA-readout": (lambda g: _Readout(g, g.GraphSAGE(_WIDTH, 8, 2)), ""),
    "DeepGCNLayer": (
        lambda g: g.DeepGCNLayer(g.GENConv(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.ReLU()),
        "",
    ),
    "GraphNorm": (
        lambda g: g.Sequential("x, e", [(g.GraphConv(_WIDTH, 8), "x, e -> x"), (g.GraphNorm(8), "x -> x")]),
        "",
    ),
    "TopKPooling": (lambda g: g.TopKPooling(_WIDTH, ratio=0.5), ""),
    "SAGPooling": (lambda g: g.SAGPooling(_WIDTH, ratio=0.5), ""),
    "GraphUNet": (lambda g: g.GraphUNet(_WIDTH, 8, 4, depth=2), ""),
}


class _Readout(nn.Module):
    """Convolutions and the mean, the sum and the maximum over each of two graphs."""

    def __init__(self, library: Any, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(24, 3)
        self.pools = (library.global_mean_pool, library.global_add_pool, library.global_max_pool)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Logits of two graphs."""
        h = self.body(x, edges)
        graph = torch.arange(len(x)) * 2 // len(x)
        logits: torch.Tensor = self.head(torch.cat([pool(h, graph, 2) for pool in self.pools], -1))
        return logits


def entries() -> tuple[Entry, ...]:
    """The list."""
    import torch_geometric  # noqa: PLC0415, F401  may be missing

    return tuple(_entry(name, make, more) for name, (make, more) in _LISTED.items())


def _entry(name: str, make: Make, more: str) -> Entry:
    def build() -> nn.Module:
        from torch_geometric import nn as library  # noqa: PLC0415

        return make(library)

    def inputs(nodes: int) -> Inputs:
        count = nodes * 3
        x, edges = torch.randn(nodes, _WIDTH), torch.randint(0, nodes, (2, count))
        extra: dict[str, torch.Tensor] = {
            "weights": torch.rand(count),
            "features": torch.randn(count, 4),
            "relations": torch.randint(0, 3, (count,)),
        }
        return (x, edges, *([extra[more]] if more else [])), {}

    return Entry(name, "pyg", build, lambda _: inputs(12), lambda _: inputs(20), fast=name == "SAGEConv")
