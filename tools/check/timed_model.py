# SPDX-License-Identifier: Apache-2.0
"""A model of set times on the test accelerator: `Shape`, `Part`, `Model`.

`auto_on_device.py` trains it, and tests of the device's clock are made of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.offload.sizes import MIB
from tests.support.lag.module import LagModule

_CHECKED = 512  # one word of each page is compared: more would take this machine's time


@dataclass(frozen=True)
class Shape:
    """Of the model: twelve layers of equal parts; backward takes twice as long as forward."""

    num_layers: int = 12
    num_parts: int = 4
    layer_s: float = 0.02
    layer_bytes: int = 4 * MIB

    @property
    def produced_bytes_per_s(self) -> float:
        """By forward, if nothing holds it up."""
        return self.layer_bytes / self.layer_s


class Work:
    """What all parts of a model share."""

    def __init__(self, lag: LagModule, shape: Shape) -> None:
        self.lag = lag
        self.num_words = shape.layer_bytes // shape.num_parts // 8
        self.forward_s = shape.layer_s / shape.num_parts
        self.num_wrong = torch.zeros((), dtype=torch.int64, device="lag")
        self.number = 0


class Part(torch.autograd.Function):
    """Computes for a while and saves a tensor, which its backward looks at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Any) -> torch.Tensor:
        """Made at the end of its time: nothing of it can be moved before."""
        saved = torch.empty(work.num_words, dtype=torch.int64, device=x.device)
        work.lag.sleep(work.forward_s)
        work.number += 1
        saved[::_CHECKED].fill_(work.number)
        ctx.save_for_backward(saved)
        ctx.work, ctx.number = work, work.number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Needs what was saved from its beginning on."""
        (saved,) = ctx.saved_tensors
        ctx.work.num_wrong += (saved[::_CHECKED] != ctx.number).sum()
        ctx.work.lag.sleep(2 * ctx.work.forward_s)
        return gradients[0].clone(), None


class Layer(torch.nn.Module):
    """Some parts one after the other."""

    def __init__(self, work: Work, first: int, num_parts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="lag"))
        self._work = work
        self._numbers = range(first, first + num_parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self._numbers:
            self._work.number = number
            x = Part.apply(x, self._work)  # type: ignore[no-untyped-call]
        return x


class Model(torch.nn.Module):
    """Layers behind a weight, so that their inputs want gradients."""

    def __init__(self, work: Work, shape: Shape) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(8, device="lag"))
        self.layers = torch.nn.ModuleList(
            Layer(work, n * shape.num_parts, shape.num_parts) for n in range(shape.num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for one in self.layers:
            x = one(x)
        return x
