# SPDX-License-Identifier: Apache-2.0
"""Where a rank's memory is once its run is set up: `where_memory_is`. Trainers print it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.offload.config import OffloadConfig
from megatron.offload.integration.megatron.model_states import ModelStates
from megatron.offload.integration.memory_by_tier import (
    MemoryRow,
    held_by_parameters,
    held_by_states,
    memory_table,
)
from megatron.offload.integration.open_parameters import gradient_tier_of, tier_of

# What the activations of a placement take beyond the one tier of that name is not known before.
_NOTES = {
    "tiered": "predicted; divided by what the tiers take",
    "auto": "predicted; planned after the first steps",
}


def where_memory_is(
    config: OffloadConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    states: ModelStates,
    *,
    activation_bytes: int,
) -> str:
    """A table for people: weights, gradients, optimizer states and activations, by tier.

    Args:
        config: says where activations go.
        model_chunks: of this rank.
        optimizer: what `get_megatron_optimizer` gave.
        states: of `offload_model_states`.
        activation_bytes: predicted, of a step.
    """
    model = [param for chunk in model_chunks for param in chunk.parameters()]
    held = held_by_states(states.states) if states.parts else MemoryRow("optimizer states")
    if not states.parts:
        held = MemoryRow("optimizer states", _state_bytes(optimizer, model))
    of_model = held_by_parameters(model, tier_of, gradient_tier_of)
    rows = [*of_model, held, _activations(config, activation_bytes)]
    return memory_table(rows, heading="memory of this rank")


def _activations(config: OffloadConfig, num_bytes: int) -> MemoryRow:
    note = _NOTES.get(config.mode, "predicted")
    if config.mode == "ssd":
        return MemoryRow("activations", ssd_bytes=num_bytes, note=note)
    if config.mode == "host":
        return MemoryRow("activations", host_bytes=num_bytes, note=note)
    return MemoryRow("activations", num_bytes, note=note)


def _state_bytes(optimizer: Any, model: Sequence[torch.Tensor]) -> int:
    """Of states that stay: two values a weight, and main weights, which are none of the model."""
    of_model = {param.untyped_storage().data_ptr() for param in model}
    found = 0
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", None)
        for group in getattr(inner, "param_groups", ()):
            for param in group["params"]:
                is_own = param.untyped_storage().data_ptr() not in of_model
                found += param.nbytes * (3 if is_own else 2)
    return found
