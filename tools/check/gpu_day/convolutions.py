# SPDX-License-Identifier: Apache-2.0
"""A network of convolutions, batch norms and activations in place: `Convolutions`.

`bits.py` trains it as it trains a Llama: tokens become images, and the result has a loss. Knows
nothing of offload.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from check.gpu_day.settings import Shape

_WIDTH = 8  # of an image, in tokens


class _Block(nn.Module):
    """A residual block, as torchvision and timm have them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [batch, channels, height, width], as is the result."""
        h = F.silu(self.norms[0](self.first(x)), inplace=True)
        h = self.norms[1](self.second(h))
        h += x
        return F.relu_(h)


class Convolutions(nn.Module):
    """Two blocks for each layer of a Llama, four channels for each of its heads.

    Args:
        shape: of the Llama.
        channels_last: so lie its images, and it computes in bf16 under autocast.
    """

    def __init__(self, shape: Shape, *, channels_last: bool) -> None:
        super().__init__()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        channels = 4 * shape.heads
        self.embedding = nn.Embedding(shape.vocab, channels)
        self.layers = nn.ModuleList(_Block(channels) for _ in range(2 * shape.layers))
        self.head = nn.Linear(channels, channels)
        self.to(memory_format=self.layout)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """`input_ids` of shape [batch, sequence]; the result has a `loss`, without `labels`."""
        images = self.embedding(input_ids).transpose(1, 2).unflatten(-1, (-1, _WIDTH))
        x = images.contiguous(memory_format=self.layout)
        casts = self.layout is torch.channels_last
        with torch.autocast(x.device.type, torch.bfloat16, enabled=casts):
            for layer in self.layers:
                x = layer(x)
            x = self.head(x.mean((-2, -1)))
        return SimpleNamespace(loss=x.float().square().mean())


def make_convolutions(shape: Shape, device: torch.device, *, channels_last: bool) -> Convolutions:
    """A new one on a device, from a fixed seed; training has begun."""
    torch.manual_seed(0)
    with device:
        return Convolutions(shape, channels_last=channels_last).train()
