# SPDX-License-Identifier: Apache-2.0
"""A small GPT on two tensor-parallel ranks, with a codec; test_codec_of_ranks.py starts it.

Prints for each codec and layout the digests of the weights that both ranks have, at first and after
15 steps, by rank.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.offload import offload_activations
from megatron.offload.integration.megatron import cpu_runtime
from tests.support.ranks import init_process_group, print_results

VOCAB, LENGTH, BATCH, STEPS = 64, 32, 2, 15


def made() -> GPTModel:
    """A new model, with dropout."""
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=2,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH)


def replicated(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        param.detach()
        for param in model.parameters()
        if not getattr(param, "tensor_model_parallel", False)
    ]


def digest(model: torch.nn.Module) -> tuple[int, str]:
    """How many weights both ranks have, and a digest of these."""
    found = replicated(model)
    sha = hashlib.sha256()
    for one in found:
        sha.update(one.numpy().tobytes())
    return len(found), sha.hexdigest()


def trained(codec: str, folder: str) -> dict[str, Any]:
    model = made()
    first = digest(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(3)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    with offload_activations(model, folder, min_bytes=1024, codec=codec) as handle:
        for _ in range(STEPS):
            tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        encoded = handle.statistics.get("encoded_bytes", 0)
    return {"first": first, "last": digest(model), "encoded_bytes": encoded, "loss": loss.item()}


def main() -> None:
    init_process_group()
    cpu_runtime.activate()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    print_results({codec: trained(codec, sys.argv[1]) for codec in ("off", "int8", "int4")})


if __name__ == "__main__":
    main()
