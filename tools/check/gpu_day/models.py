# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with its own defaults: `make_model`, `add_adapters`, `make_tokens`.

`training.py`, `bits.py` and `forward.py` run them; `config_of` and `rank_of` are for estimates of
them too. Knows nothing of offload.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from check.gpu_day.settings import Shape


def config_of(shape: Shape) -> transformers.LlamaConfig:
    """A configuration, all but its sizes as it is by default."""
    return transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=max(shape.seq, 8192),
    )


def rank_of(shape: Shape) -> int:
    """Of LoRA's adapters: 16 for Llama-3 8B."""
    return max(shape.hidden // 256, 1)


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A new model on a device, from a fixed seed; training has begun."""
    return _made(transformers.LlamaForCausalLM, config_of(shape), device, dtype)


def make_experts(shape: Shape, device: torch.device) -> Any:
    """A mixture of experts instead, each token to 4 of 16: each is an eighth as wide as the MLP."""
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate // 8,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        num_experts=16,
        num_experts_per_tok=4,
    )
    return _made(transformers.Qwen3MoeForCausalLM, config, device, torch.bfloat16)


def _made(kind: Any, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def add_adapters(model: Any, shape: Shape) -> Any:
    """LoRA's adapters on every projection; all else is frozen."""
    import peft

    config = peft.LoraConfig(r=rank_of(shape), target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def make_tokens(shape: Shape, count: int, device: torch.device) -> list[torch.Tensor]:
    """Random tokens for so many steps, on the device: no copy belongs to a step."""
    made = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        size = (shape.batch, shape.seq)
        made.append(torch.randint(0, shape.vocab, size, generator=generator).to(device))
    return made
