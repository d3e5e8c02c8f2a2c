# SPDX-License-Identifier: Apache-2.0
"""The measurements of the last steps that a prediction is made from: `profile_of`."""

from __future__ import annotations

from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.prediction import StatesProfile


def profile_of(
    states: OptimizerStates, write_limit_bytes_per_s: float | None = None
) -> StatesProfile | None:
    """Measurements of an optimizer's settled steps; None before one has read and written.

    Args:
        states: whose last steps are read.
        write_limit_bytes_per_s: `StatesConfig.write_bytes_per_s`, which drives do not know.
    """
    meter = states.meter
    updated_bytes = meter.median("updated_bytes")
    moved = states.tiers[-1].statistics  # the window of an accelerator is a tier before it
    reads, writes = moved.reads.bytes_per_s, moved.writes.bytes_per_s
    if not updated_bytes or not reads or not writes:
        return None
    return StatesProfile(
        bucket_bytes=tuple(one.num_bytes for one in states.buckets),
        read_bytes_per_s=reads,
        write_bytes_per_s=writes,
        update_s_per_byte=meter.median("update_s") / updated_bytes,
        between_s=meter.median("between_s"),
        write_limit_bytes_per_s=write_limit_bytes_per_s,
        prefetch_s=meter.median("prefetch_s"),
    )


def window_of(states: OptimizerStates) -> int:
    """The window as predictions count it: an accelerator's is three buckets and the host tier."""
    before = sum(tier.limit_bytes or 0 for tier in states.tiers[:-1])
    largest = max((one.num_bytes for one in states.buckets), default=0)
    return max(states.window_bytes, 2 * largest) + before
