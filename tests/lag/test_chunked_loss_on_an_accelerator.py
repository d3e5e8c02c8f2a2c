# SPDX-License-Identifier: Apache-2.0
"""A chunked loss on an accelerator takes a small part of the memory that logits in one piece do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.offload.device.open import open_device
from megatron.offload.ops.chunked_logits import LossSettings
from megatron.offload.ops.chunked_loss import chunked_cross_entropy
from megatron.offload.ops.chunked_mean import chunked_mean_loss
from megatron.offload.stats.memory import PeakMemory
from tests.support.lag.module import LagModule

pytestmark = pytest.mark.usefixtures("accelerator")

DEVICE = "lag"
TOKENS, HIDDEN, VOCABULARY = 2048, 32, 4096
SETTINGS = LossSettings(chunk_tokens=64)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def masked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_cross_entropy(hidden, weight, labels, settings=SETTINGS).mean()


def mean(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    divisor = torch.tensor(len(labels), device=DEVICE)
    return chunked_mean_loss(hidden, weight, labels, divisor, settings=SETTINGS)


def run(lag: LagModule, loss: Loss) -> tuple[int, float]:
    """The peak of forward and backward, gradients included, and the loss."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(size, HIDDEN, generator=draw).bfloat16().to(DEVICE).requires_grad_()
        for size in (TOKENS, VOCABULARY)
    )
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draw).to(DEVICE)
    lag.synchronize()
    peak = PeakMemory(open_device(DEVICE))
    peak.begin_step()
    value = loss(hidden, weight, labels)
    value.backward()
    lag.synchronize()
    return peak.end_step(), value.item()


@pytest.mark.parametrize("loss", [masked, mean])
def test_its_peak_is_at_most_a_tenth(lag: LagModule, loss: Loss) -> None:
    eager_bytes, expected = run(lag, eager)
    found_bytes, value = run(lag, loss)
    assert eager_bytes >= TOKENS * VOCABULARY * 4
    assert found_bytes <= eager_bytes / 10
    assert abs(value - expected) < 1e-3 * expected  # within rounding
