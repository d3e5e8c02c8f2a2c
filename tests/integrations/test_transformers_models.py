# SPDX-License-Identifier: Apache-2.0
"""Models of transformers train with the door as they train without it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.same_training import NUM_STEPS, Batch, train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS, WORDS = 64, 128


def llama() -> torch.nn.Module:
    """A Llama of four layers."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=WORDS,
            use_cache=False,
        )
    )


def text_batches() -> list[Batch]:
    """Tokens that are their own labels."""
    made = []
    for step in range(NUM_STEPS):
        tokens = torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(step))
        made.append({"input_ids": tokens, "labels": tokens})
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama])
def test_a_model_trains_the_same(
    make: Callable[[], torch.nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = train(lambda: make().to(dtype), text_batches())
    found = train(lambda: make().to(dtype), text_batches(), tmp_path)
    assert found == expected
    assert all(one["offloaded_storages"] > 10 for one in found.statistics)
