# SPDX-License-Identifier: Apache-2.0
"""Llamas of transformers with its own defaults: `make_model`, `add_adapters`, `make_tokens`.

`training.py` and `bits.py` train them. Knows nothing of offload.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from check.gpu_day.settings import Shape


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A new model on a device, from a fixed seed; training has begun."""
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=max(shape.seq, 8192),
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def add_adapters(model: Any, shape: Shape) -> Any:
    """LoRA's adapters on every projection, of rank 16 for Llama-3 8B; all else is frozen."""
    import peft

    rank = max(shape.hidden // 256, 1)
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def make_tokens(shape: Shape, count: int, device: torch.device) -> list[torch.Tensor]:
    """Random tokens for so many steps, on the device: no copy belongs to a step."""
    made = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        size = (shape.batch, shape.seq)
        made.append(torch.randint(0, shape.vocab, size, generator=generator).to(device))
    return made
