# SPDX-License-Identifier: Apache-2.0
"""A model of set times on the test accelerator: `Shape`, `Model`. `auto_on_device.py` trains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bench.overlap import Part

from megatron.offload.sizes import MIB
from tests.support.lag.module import LagModule


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
    """What all parts of a model share; see `bench.overlap.Part`."""

    def __init__(self, lag: LagModule, shape: Shape) -> None:
        self.lag = lag
        self.num_words = shape.layer_bytes // shape.num_parts // 8
        self.forward_s = shape.layer_s / shape.num_parts
        self.num_wrong = torch.zeros((), dtype=torch.int64, device="lag")
        self.number = 0


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
