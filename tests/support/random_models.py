# SPDX-License-Identifier: Apache-2.0
"""Small models of parts that trainings have: `Net` and `Critic`, made of the kinds of `BODIES`.

`random_trainings.py` draws which. All layers are of one class, so that the doors find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
HIDDEN, VOCABULARY = 8, 12


class _Cube(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh() ** 3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return gradient * 3 * x.tanh() ** 2 * (1 - x.tanh() ** 2)


class _Function(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(super().forward(x))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.mT)), inplace=True).mT


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class _Counting(nn.Module):
    """Changes buffers in place, and takes a new one in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("last", torch.zeros(HIDDEN), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
                self.last = x.detach().float().amax((0, 1))
        return self.linear(x - self.mean)


class _Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = _mlp()
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self._use_reentrant)


class _Experts(nn.Module):
    """Tokens go to one of two experts; one of them may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 2)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights = self.router(flat).softmax(-1)
        self.penalty = weights.square().mean()  # for the loss
        chosen, result = weights.argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero().flatten()
            if len(index):
                out = expert(flat[index]) * weights[index, number, None]
                result = result.index_add(0, index, out.to(result.dtype))
        return result.view_as(x)


class _Skipped(nn.Module):
    """Is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training and torch.rand(()) < 0.4 else self.inner(x)


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=HIDDEN)
        return (mixed * self.scales[0]).sin() * self.scales[1]


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sigmoid_()
        y = y.mul(x).add_(1)
        y[:, 0] = 0.5
        return y.clamp_(-2, 2)


class _Renormed(nn.Module):
    """Changes a weight in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, HIDDEN, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.positions(torch.arange(x.shape[1]) % 16)


class _Odd(nn.Module):
    """Parameters of other types and shapes, and one with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("index", torch.arange(HIDDEN).flip(0))
        self.mixed = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t())
        self.wide = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))
        weight = torch.randn(HIDDEN, HIDDEN, 3, 1).to(memory_format=torch.channels_last)
        self.kernel = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., self.index] @ self.mixed.to(x.dtype) * self.scale + self.nothing.sum()
        y = F.conv2d(y.mT[..., None], self.kernel.to(y.dtype), padding=(1, 0))[..., 0].mT
        return y.sin() * self.wide.to(y.dtype)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(HIDDEN, HIDDEN // 2, 2, dropout=0.1, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [x.shape[1] - number % 2 for number in range(x.shape[0])]
        packed = nn.utils.rnn.pack_padded_sequence(
            x.mT.mT.transpose(0, 1), lengths, enforce_sorted=False
        )
        result, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], total_length=x.shape[1])
        return result.transpose(0, 1)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _mlp() -> nn.Module:
    up, down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
    return nn.Sequential(up, nn.GELU(), nn.Dropout(0.2), down)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "gated": _Gated,
    "attention": _Attention,
    "encoder": _Encoder,
    "conv": _Conv,
    "recurrent": _Recurrent,
    "function": lambda: _Function(HIDDEN, HIDDEN),
    "counting": _Counting,
    "checkpointed": lambda: _Checkpointed(use_reentrant=False),
    "reentrant": lambda: _Checkpointed(use_reentrant=True),
    "experts": _Experts,
    "skipped": _Skipped,
    "fourier": _Fourier,
    "in_place": _InPlace,
    "renormed": _Renormed,
    "odd": _Odd,
    "packed": _Packed,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(HIDDEN, HIDDEN, bias=False)),
}


class Block(nn.Module):
    """A layer: a norm and one of `BODIES`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.body = BODIES[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Net(nn.Module):
    """From tokens (batch, sequence) to the loss of the next ones, or to hidden states.

    Args:
        kinds: of layers, keys of `BODIES`.
        tied: the head has the embedding's weight.
        calls_again: the first layer is called once more at the end.
    """

    def __init__(self, kinds: Sequence[str], *, tied: bool, calls_again: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self._calls_again = calls_again
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, hidden_only: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self._calls_again:
            x = self.blocks[0](x)
        x = self.norm(x)
        if hidden_only:
            return x
        logits = self.head(x).flatten(0, 1).float()
        loss = F.cross_entropy(logits, tokens.roll(-1, 1).flatten())
        penalties = [vars(one.body).pop("penalty", 0) for one in self.blocks]
        return loss + 0.1 * sum(penalties)


class Critic(nn.Module):
    """From hidden states to a number for each sequence."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(x.mean(1))
