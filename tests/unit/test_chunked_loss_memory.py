# SPDX-License-Identifier: Apache-2.0
"""How much memory a chunked loss takes with the vocabulary of Llama 3, computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.offload.ops import chunked_gradients
from megatron.offload.ops.chunked_gradients import _PRODUCT_BYTES
from megatron.offload.ops.chunked_logits import LossSettings
from megatron.offload.ops.chunked_loss import chunked_cross_entropy
from megatron.offload.ops.chunked_mean import chunked_mean_loss
from megatron.offload.sizes import MIB
from tests.support.computed_memory import ComputedMemory

VOCABULARY, HIDDEN, BF16, FP32 = 128256, 4096, 2, 4
CHUNK_BYTES = 1024 * VOCABULARY * (BF16 + FP32)  # logits, and the same in fp32
WEIGHT_BYTES = VOCABULARY * HIDDEN


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the weight's gradient is CUDA's."""

    def add(self: Any, wide: torch.Tensor, narrow: torch.Tensor, hidden: torch.Tensor) -> None:
        chunked_gradients._add_product(self.total, narrow.t(), hidden)

    monkeypatch.setattr(chunked_gradients._WeightGradient, "add", add)


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def masked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_cross_entropy(hidden, weight, labels).mean()


def mean(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_mean_loss(hidden, weight, labels, torch.tensor(len(labels), device="meta"))


def added(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """To a gradient in fp32 that Megatron has anyway."""
    settings = LossSettings(into_main_grad=True)
    return chunked_cross_entropy(hidden, weight, labels, settings=settings).mean()


def peak_bytes(loss: Any, num_tokens: int, *, has_main_grad: bool = False) -> int:
    """Of forward and backward, gradients included."""
    shapes = (num_tokens, HIDDEN), (VOCABULARY, HIDDEN)
    hidden, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in shapes
    )
    labels = torch.empty(num_tokens, dtype=torch.long, device="meta")
    there = [hidden, weight, labels]
    if has_main_grad:
        there.append(torch.empty(shapes[1], device="meta"))
        weight.main_grad = there[-1]  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    with ComputedMemory() as memory:
        memory.count_none(*there)
        loss(hidden, weight, labels).backward()
    return memory.peak_bytes


@pytest.mark.parametrize("loss", [masked, mean])
def test_no_more_is_there_than_the_gradient_in_fp32_a_chunk_and_a_block(loss: Any) -> None:
    num_tokens = 8192
    hidden_bytes = num_tokens * HIDDEN * BF16
    bound_bytes = WEIGHT_BYTES * FP32 + hidden_bytes + CHUNK_BYTES + _PRODUCT_BYTES
    assert peak_bytes(loss, num_tokens) <= bound_bytes + MIB


@pytest.mark.parametrize("loss", [masked, mean])
def test_with_a_long_sequence_it_takes_a_tenth_of_the_eager_loss(loss: Any) -> None:
    num_tokens = 32768
    assert peak_bytes(loss, num_tokens) <= peak_bytes(eager, num_tokens) / 10


def test_where_the_gradient_in_fp32_is_there_anyway_so_it_does_with_a_short_one() -> None:
    num_tokens = 8192
    own_bytes = peak_bytes(added, num_tokens, has_main_grad=True)
    assert own_bytes <= peak_bytes(eager, num_tokens) / 10
