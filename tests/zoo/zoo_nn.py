"""Layers of torch.nn and compositions of them that models are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

from tests.zoo.entry import Entry, Inputs

__all__ = ["entries"]

Make = Callable[..., Any]


def entries() -> tuple[Entry, ...]:
    """The list."""
    return tuple(_LISTED)


_LISTED: list[Entry] = []


def _add(name: str, build: Callable[[], nn.Module], inputs: Make | None, **options: Any) -> None:
    """*inputs* makes the arguments for a batch size and a length."""
    make = inputs or (lambda batch, length: torch.randn(batch, length, 16))

    def with_sizes(batch: int, length: int) -> Inputs:
        made = make(batch, length)
        return (made if isinstance(made, tuple) else (made,)), {}

    _LISTED.append(
        Entry(
            name,
            "nn",
            build,
            lambda training: with_sizes(2, 6),
            lambda training: with_sizes(4, 10),
            **options,
        )
    )


class _With(nn.Module):
    """A module and a function that calls it."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        """``call(self, *args)``."""
        return self.call(self, *args)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 20, (batch, length))


def _image(channels: int = 3, side: int = 16) -> Make:
    return lambda batch, length: torch.randn(batch, channels, side, side)


def _two(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, 16), torch.randn(batch, length + 2, 16)


def _padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    lengths = torch.full((batch, 1), length)
    lengths[-1] -= 2
    return torch.randn(batch, length, 16), torch.arange(length)[None] >= lengths


# --- recurrent ------------------------------------------------------------------------------------------

for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    _add(_kind.__name__, partial(_kind, 16, 12, batch_first=True), None)
    _add(
        f"{_kind.__name__}-2-layers-bidirectional",
        partial(_kind, 16, 12, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True),
        None,
    )
_add("LSTM-projection", lambda: nn.LSTM(16, 12, proj_size=6, batch_first=True), None)


def _packed(self: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def _make_packed(kind: Callable[..., nn.Module]) -> nn.Module:
    return _With(_packed, rnn=kind(16, 12, batch_first=True))


for _kind in (nn.GRU, nn.LSTM):
    _add(
        f"{_kind.__name__}-packed",
        partial(_make_packed, _kind),
        lambda batch, length: (torch.randn(batch, length, 16), torch.arange(length, length - batch, -1)),
    )


def _cells(self: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = self.cell(step, state)
    return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def _make_cells(kind: Callable[..., nn.Module]) -> nn.Module:
    return _With(_cells, cell=kind(16, 12))


for _cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
    _add(_cell.__name__, partial(_make_cells, _cell), None)

# --- attention ------------------------------------------------------------------------------------------

_add(
    "MultiheadAttention",
    lambda: _With(lambda self, x: self.m(x, x, x), m=nn.MultiheadAttention(16, 2, batch_first=True)),
    None,
    fast=True,
)
_add(
    "MultiheadAttention-without-weights",
    lambda: _With(
        lambda self, x: self.m(x, x, x, need_weights=False), m=nn.MultiheadAttention(16, 2, batch_first=True)
    ),
    None,
)
_add(
    "MultiheadAttention-cross-masked",
    lambda: _With(
        lambda self, x, mask: self.m(x, x + 1, x * 2, key_padding_mask=mask, average_attn_weights=False),
        m=nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True, kdim=16, vdim=16, dropout=0.1),
    ),
    _padded,
)
_add("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), None)
_add(
    "TransformerEncoderLayer-pre-norm",
    lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu"),
    None,
)
_add(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
    None,
)
_add(
    "TransformerEncoder-padding",
    lambda: _With(
        lambda self, x, mask: self.m(x, src_key_padding_mask=mask),
        m=nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
    ),
    _padded,
)
_add("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), _two)
_add("Transformer", lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), _two)


def _causal(self: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    out: Tensor = self.m(x, mask=mask, is_causal=True)
    return out


_add(
    "TransformerEncoder-causal",
    lambda: _With(
        _causal, m=nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    ),
    None,
)

# --- embeddings and losses ------------------------------------------------------------------------------

_add("Embedding", lambda: nn.Sequential(nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 4)), _tokens)
_add(
    "Embedding-max-norm", lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 4)), _tokens
)
_add("Embedding-sparse", lambda: nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)), _tokens)


def _make_bag(mode: str) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20, 16, mode=mode), nn.Linear(16, 4))


for _mode in ("sum", "mean", "max"):
    _add(
        f"EmbeddingBag-{_mode}",
        partial(_make_bag, _mode),
        _tokens,
    )
_add(
    "EmbeddingBag-offsets",
    lambda: _With(
        lambda self, x: self.m(x.flatten(), torch.arange(0, x.numel(), 3)), m=nn.EmbeddingBag(20, 16)
    ),
    _tokens,
)


def _ctc(self: Any, x: Tensor) -> Tensor:
    logs = self.linear(x).log_softmax(-1).transpose(0, 1)
    batch, length = x.shape[:2]
    targets = torch.arange(1, 4).repeat(batch, 1)
    loss: Tensor = self.loss(logs, targets, torch.full((batch,), length), torch.full((batch,), 3))
    return loss


_add("CTCLoss", lambda: _With(_ctc, linear=nn.Linear(16, 8), loss=nn.CTCLoss()), None)
_add(
    "AdaptiveLogSoftmax",
    lambda: _With(
        lambda self, x, y: self.m(x, y), m=nn.AdaptiveLogSoftmaxWithLoss(16, 20, cutoffs=[5, 10], div_value=2)
    ),
    lambda batch, length: (torch.randn(batch * length, 16), torch.randint(0, 20, (batch * length,))),
)


def _labels(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 16), torch.randint(0, 4, (batch,))


def _likes(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 16), torch.rand(batch, 4)


def _pairs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 16), torch.ones(batch)


def _plain_loss(loss: nn.Module) -> Callable[[], nn.Module]:
    return lambda: _With(lambda self, x, y: self.loss(self.linear(x), y), linear=nn.Linear(16, 4), loss=loss)


_add("CrossEntropyLoss", _plain_loss(nn.CrossEntropyLoss()), _labels)
_add(
    "CrossEntropyLoss-weighted",
    _plain_loss(nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.linspace(0.2, 1, 4))),
    _labels,
)
_add("MultiMarginLoss", _plain_loss(nn.MultiMarginLoss()), _labels)
_LOSSES: tuple[nn.Module, ...] = (
    nn.MSELoss(),
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(),
    nn.BCEWithLogitsLoss(),
    nn.KLDivLoss(reduction="batchmean"),
    nn.PoissonNLLLoss(),
    nn.SoftMarginLoss(),
    nn.MultiLabelSoftMarginLoss(),
)
for _loss in _LOSSES:
    _add(type(_loss).__name__, _plain_loss(_loss), _likes)
_add(
    "GaussianNLLLoss",
    lambda: _With(
        lambda self, x, y: self.loss(self.linear(x), y, torch.ones_like(y)),
        linear=nn.Linear(16, 4),
        loss=nn.GaussianNLLLoss(),
    ),
    _likes,
)
_add(
    "NLLLoss",
    lambda: _With(
        lambda self, x, y: self.loss(self.linear(x).log_softmax(-1), y),
        linear=nn.Linear(16, 4),
        loss=nn.NLLLoss(),
    ),
    _labels,
)
_add(
    "CosineEmbeddingLoss",
    lambda: _With(
        lambda self, x, y: self.loss(*self.linear(x).chunk(2, -1), y),
        linear=nn.Linear(16, 8),
        loss=nn.CosineEmbeddingLoss(),
    ),
    _pairs,
)
_add(
    "MarginRankingLoss",
    lambda: _With(
        lambda self, x, y: self.loss(*self.linear(x).unbind(-1), y),
        linear=nn.Linear(16, 2),
        loss=nn.MarginRankingLoss(),
    ),
    _pairs,
)
_add(
    "TripletMarginLoss",
    lambda: _With(
        lambda self, x: self.loss(*self.linear(x).chunk(3, -1)),
        linear=nn.Linear(16, 12),
        loss=nn.TripletMarginLoss(),
    ),
    lambda batch, length: torch.randn(batch, 16),
)

# --- convolutions, norms, pooling -------------------------------------------------------------------------

_add(
    "Conv1d",
    lambda: nn.Sequential(nn.Conv1d(16, 8, 3, padding="same"), nn.BatchNorm1d(8), nn.GLU(1)),
    lambda batch, length: torch.randn(batch, 16, length),
)
_add(
    "Conv2d-padding-modes",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", groups=4),
        nn.Conv2d(8, 8, 3, dilation=2, padding_mode="replicate", padding=2),
    ),
    _image(),
)
_add(
    "Conv3d",
    lambda: nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.MaxPool3d(2)),
    lambda batch, length: torch.randn(batch, 3, 4, 8, 8),
)
_add(
    "ConvTranspose",
    lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2, stride=2),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
    ),
    _image(side=8),
)
_add(
    "norms",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8),
        nn.LocalResponseNorm(2),
        nn.LayerNorm([8, 16, 16]),
    ),
    _image(),
)
_add("RMSNorm", lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 4)), None)
_add(
    "BatchNorm-momentum-none",
    lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None)),
    lambda batch, length: torch.randn(batch, 16),
)
_add(
    "pooling",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.LPPool2d(2, 2),
        nn.AdaptiveMaxPool2d(1),
    ),
    _image(),
)
_add(
    "FractionalMaxPool",
    lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.FractionalMaxPool2d(2, output_size=5)),
    _image(),
)
_add(
    "MaxUnpool",
    lambda: _With(
        lambda self, x: self.un(*self.pool(self.conv(x))),
        conv=nn.Conv2d(3, 8, 1),
        pool=nn.MaxPool2d(2, return_indices=True),
        un=nn.MaxUnpool2d(2),
    ),
    _image(),
)


def _upsample(how: str) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode=how), nn.Conv2d(4, 4, 1))


for _how in ("nearest", "bilinear", "bicubic"):
    _add(f"Upsample-{_how}", partial(_upsample, _how), _image(side=8))
_add(
    "PixelShuffle",
    lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(4)),
    _image(),
)
_add(
    "Fold-Unfold",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Unfold(2, stride=2), nn.Fold((16, 16), 2, stride=2)),
    _image(),
)
_add(
    "Bilinear",
    lambda: _With(lambda self, x: self.m(x, x.flip(0)), m=nn.Bilinear(16, 16, 4)),
    lambda batch, length: torch.randn(batch, 16),
)
_add(
    "activations",
    lambda: nn.Sequential(
        nn.Linear(16, 16),
        nn.PReLU(),
        nn.Hardswish(),
        nn.Mish(),
        nn.CELU(),
        nn.Softplus(),
        nn.LogSigmoid(),
        nn.Tanhshrink(),
        nn.RReLU(),
        nn.Threshold(0.1, 0.2),
        nn.Softmin(-1),
    ),
    None,
)
_add(
    "dropouts",
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.Dropout2d(0.3),
        nn.Conv2d(8, 8, 1),
        nn.AlphaDropout(0.2),
        nn.FeatureAlphaDropout(0.2),
    ),
    _image(),
)
_add(
    "CosineSimilarity",
    lambda: _With(
        lambda self, x: self.m(self.linear(x), self.linear(x + 1)),
        linear=nn.Linear(16, 8),
        m=nn.CosineSimilarity(-1),
    ),
    None,
)
_add(
    "PairwiseDistance-cdist",
    lambda: _With(
        lambda self, x: torch.cdist(self.linear(x), self.linear(x.flip(1))), linear=nn.Linear(16, 8)
    ),
    None,
)

# --- parametrizations, sampling, wrappers -----------------------------------------------------------------

_add("weight-norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 8)), nn.ReLU()), None)
_add(
    "spectral-norm", lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 8)), nn.ReLU()), None
)
_add("orthogonal", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.ReLU()), None)
_add("old-weight-norm", lambda: torch.nn.utils.weight_norm(nn.Linear(16, 8)), None)
_add("old-spectral-norm", lambda: torch.nn.utils.spectral_norm(nn.Linear(16, 8)), None)
_add(
    "spatial-transformer",
    lambda: _With(
        lambda self, x: functional.grid_sample(
            x,
            functional.affine_grid(
                self.linear(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False
            ),
            align_corners=False,
        ),
        linear=nn.Linear(3, 6),
    ),
    _image(),
)
_add(
    "gumbel-softmax",
    lambda: _With(
        lambda self, x: functional.gumbel_softmax(self.linear(x), hard=True), linear=nn.Linear(16, 8)
    ),
    None,
)
_add(
    "einsum",
    lambda: _With(
        lambda self, x: torch.einsum("bld,bmd->blm", self.linear(x), self.linear(x)), linear=nn.Linear(16, 8)
    ),
    None,
)
_add(
    "fft",
    lambda: _With(lambda self, x: self.linear(torch.fft.rfft(x, dim=1).abs()), linear=nn.Linear(16, 8)),
    None,
)


def _checkpointed(self: Any, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(self.m, x, use_reentrant=False)


_add(
    "checkpoint",
    lambda: _With(_checkpointed, m=nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4))),
    None,
)
_add(
    "item",
    lambda: _With(lambda self, x: self.m(x) * (2.0 if x.mean().item() > 0 else 0.5), m=nn.Linear(16, 4)),
    None,
)
_add("nonzero", lambda: _With(lambda self, x: self.m(x[x[..., 0] > 0]), m=nn.Linear(16, 4)), None)
