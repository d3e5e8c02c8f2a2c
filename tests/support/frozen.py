# SPDX-License-Identifier: Apache-2.0
"""Frozen matrices as a codec keeps them, for a model in memory: `round_matrices`."""

from __future__ import annotations

import torch

from megatron.offload.parameters.weight_codec import CODECS


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
