# SPDX-License-Identifier: Apache-2.0
"""Frozen models with adapters: trained, compared, rounded in memory as a codec keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.offload.parameters.weight_codec import CODECS

VOCABULARY = 61


def round_matrices(module: torch.nn.Module, codec: str) -> None:
    """Rounds each frozen matrix of a module in place, once."""
    chosen = CODECS[codec]
    for param in module.parameters():
        if param.requires_grad or param.dim() < 2:
            continue
        values = param.data.view(-1)
        encoded = torch.empty(
            chosen.encoded_bytes(len(values), values.dtype), dtype=torch.uint8, device=values.device
        )
        chosen.encode(values, encoded)
        chosen.decode(encoded, values)


def with_adapters(model: Any, modules: Sequence[str] = ("q_proj", "down_proj")) -> Any:
    """The model with the same few adapters each time."""
    import peft

    torch.manual_seed(5)
    settings = peft.LoraConfig(r=2, target_modules=list(modules), lora_dropout=0.1)
    return peft.get_peft_model(model, settings)


def train(model: Any) -> list[float]:
    """The losses of three steps of what is trained, with tokens below `VOCABULARY`."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(9)
    losses = []
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (2, 16)).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Two states have the same names and bits."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name].cpu(), one.cpu()), name
