# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers and batches for them, from fixed seeds."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.same_training import NUM_STEPS, Batch

TOKENS, WORDS, HIDDEN, LAYERS = 64, 128, 64, 4


def llama(**changes: Any) -> torch.nn.Module:
    """A Llama of four layers."""
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": WORDS,
        **changes,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def checkpointed_llama() -> torch.nn.Module:
    """The same with transformers' own gradient checkpointing."""
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def text_batches(rank: int = 0, num_steps: int = NUM_STEPS) -> list[Batch]:
    """Tokens that are their own labels, others on each rank and in each step."""
    made = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        tokens = torch.randint(0, WORDS, (2, TOKENS), generator=generator)
        made.append({"input_ids": tokens, "labels": tokens})
    return made
