# SPDX-License-Identifier: Apache-2.0
"""The profile of micro-batches of another size, from two that were measured: `fitted`.

The planner asks when a run's sequence length changes, instead of measuring once more. Seconds and
bytes are taken to lie on a straight line over sequence length x micro-batch size; that is too
little for attention beyond what was measured, so it is good between the two and near them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.stage_profile import StageProfile

# What depends on the size; of the rest the later profile's is taken.
_FITTED = (
    "layers",
    "before_s",
    "after_s",
    "backward_before_s",
    "backward_after_s",
    "pass_fixed_bytes",
    "transient_bytes",
)


def tokens_of(sizes: Mapping[str, int]) -> int:
    """Sequence length x micro-batch size; 0: not known."""
    return sizes.get("sequence_length", 0) * sizes.get("micro_batch_size", 0)


def fitted(one: StageProfile, other: StageProfile, sizes: dict[str, int]) -> StageProfile | None:
    """The profile for micro-batches of other sizes, on the straight line through two.

    Args:
        one: measured with micro-batches of one size.
        other: of the same stage, later, with another; its tiers are taken.
        sizes: see `StageProfile`.

    Returns:
        None if the two are of one size, or not of the same layers and parts, or if the larger one
        does not save more: then they are no line to follow.
    """
    low, high = tokens_of(one.sizes), tokens_of(other.sizes)
    if low == high or not low or not high or _names(one) != _names(other):
        return None
    if (_saved_bytes(other) - _saved_bytes(one)) * (high - low) <= 0:
        return None
    part = (tokens_of(sizes) - low) / (high - low)

    def between(_: str, a: float, b: float) -> float:
        value = max(a + part * (b - a), 0.0)
        return value if isinstance(a, float) else round(value)

    fields = {
        name: with_numbers(between, getattr(one, name), getattr(other, name)) for name in _FITTED
    }
    return dataclasses.replace(other, **fields, sizes=dict(sizes), source="fitted to two sizes")


def _saved_bytes(profile: StageProfile) -> int:
    return sum(layer.movable_bytes for layer in profile.layers)


def _names(profile: StageProfile) -> list[Any]:
    return [(one.chunk, one.name, [g.name for g in one.parts]) for one in profile.layers]
