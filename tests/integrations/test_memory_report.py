# SPDX-License-Identifier: Apache-2.0
"""What a peak is made of, in plain PyTorch: large tensors go by the names of their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload.activations.placement.plan_file import plans_from_json
from megatron.offload.activations.stats.memory_parts import KEPT, load_steps
from megatron.offload.commands.memory.command import predicted_peak
from tests.support.models import Block
from tests.support.same_training import Batch, Training, train

HIDDEN, LARGE_BYTES = 64, 32 << 20


class Widening(Block):
    """A block that saves a large tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        wide = x.new_zeros(LARGE_BYTES // x.element_size() // x[..., :1].numel()) + x[..., :1]
        return x + wide.exp().mean(-1, keepdim=True)


class Stack(torch.nn.Module):
    """Blocks, the third of which is wide."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Block, Block, Widening, Block)
        self.blocks = torch.nn.ModuleList(kind(HIDDEN) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(num_steps: int, directory: Path | None = None, **settings: Any) -> Training:
    batches: list[Batch] = [
        {"x": torch.randn(2, 64, HIDDEN, generator=torch.Generator().manual_seed(step))}
        for step in range(num_steps)
    ]
    return train(Stack, batches, directory, call=lambda m, b: m(**b), **settings)


@pytest.mark.slow
def test_a_large_tensor_that_stays_is_named_after_its_layer(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    others = {"layers": ["Block", "Widening"], "offload_layers": "0,1,3"}
    found = trained(6, tmp_path, memory_report_file=str(file), **others)
    assert found == trained(6)
    steps = load_steps(file)
    assert [one.step for one in steps] == [3, 4, 5]
    for step in steps:
        largest = max(step.peak.layers, key=lambda name: step.peak.layers[name])
        assert largest == "blocks.2"
        assert LARGE_BYTES <= step.peak.layers[largest] < 1.1 * LARGE_BYTES
        assert LARGE_BYTES <= step.peak_parts[KEPT] < 1.1 * LARGE_BYTES
        assert sum(step.peak_parts.values()) == step.peak_bytes >= LARGE_BYTES


@pytest.mark.slow
def test_with_auto_the_predicted_peak_has_the_same_names(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    settings = {"mode": "auto", "memory_budget_bytes": "1GiB", "layers": ["Block", "Widening"]}
    assert trained(6, tmp_path, memory_report_file=str(file), **settings) == trained(6)
    steps = load_steps(file)
    assert [one.step for one in steps] == [4, 5, 6]  # the first three are measured for the plan
    for step in steps:
        predicted = predicted_peak(step)
        (plan,) = plans_from_json(step.plan).values()
        assert predicted is not None and plan.predicted is not None
        assert sum(predicted.parts.values()) == plan.predicted.peak_bytes
        # There is room for all of it.
        assert set(predicted.parts) < set(step.peak_parts)
        for layers in (predicted.layers, step.peak.layers):
            assert LARGE_BYTES <= layers["blocks.2"] < 1.1 * LARGE_BYTES
