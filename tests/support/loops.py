# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch model, its input and its gradients, for tests of training loops."""

from __future__ import annotations

import torch

from tests.support.models import Block
from tests.support.same_training import digest

HIDDEN = 32


class Net(torch.nn.Module):
    """Blocks with dropout."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block(HIDDEN) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(seed))


def gradients(*models: torch.nn.Module) -> list[str | None]:
    return [
        None if p.grad is None else digest(p.grad) for model in models for p in model.parameters()
    ]
