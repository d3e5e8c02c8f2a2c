# SPDX-License-Identifier: Apache-2.0
"""Makes a profile agree with whole steps: `calibrated`. The planner calls it before it plans.

A profile is put together from parts, each the median of its own times, and knows of no working
memory. Its simulation misses what lies between the parts, and what the allocator adds. Both were
measured with one plan and are taken to be the same with another, but for the allocator's fragments,
which grow in proportion to the memory in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.planner.profile.numbers import with_numbers
from megatron.offload.planner.profile.stage_profile import StageProfile

_MOST_SCALED = 2.0  # a step this many times as long as simulated is not only slower to compute


def calibrated(
    profile: StageProfile,
    simulate: Callable[[StageProfile], Prediction],
    *,
    peak_bytes: int,
    step_s: float | None = None,
) -> StageProfile:
    """The profile whose simulation shows what was measured.

    Args:
        profile: as it was put together.
        simulate: a step with the plan that was followed.
        peak_bytes: what activations took at most. The first steps, where everything is offloaded,
            show too much of it on a CPU: there an allocator holds freed memory that kept
            activations would take.
        step_s: what a step took, in seconds; None: leave the times as they are. On a device that
            runs behind its host without what it stood still: its seconds of computing are its own,
            and waits while everything moves say nothing of other plans. What is missing there lies
            between the layers.
    """
    if step_s is not None and profile.lead_layers:
        simulated = simulate(profile)
        missing_s = step_s - (simulated.step_s - simulated.stall_s)
        step_fixed_s = max(profile.step_fixed_s + missing_s, 0.0)
        profile = dataclasses.replace(profile, step_fixed_s=step_fixed_s)
    elif step_s is not None:
        factor = step_s / max(simulate(profile).step_s, 1e-9)
        profile = _slower(profile, min(max(factor, 1 / _MOST_SCALED), _MOST_SCALED))
        missing_s = step_s - simulate(profile).step_s
        step_fixed_s = max(profile.step_fixed_s + missing_s, 0.0)
        profile = dataclasses.replace(profile, step_fixed_s=step_fixed_s)
    return _with_peak(profile, simulate, peak_bytes)


def _with_peak(
    profile: StageProfile, simulate: Callable[[StageProfile], Prediction], peak_bytes: int
) -> StageProfile:
    """What is missing is working memory; where even without any there is too much, it is slack."""
    profile = dataclasses.replace(profile, transient_bytes=0)
    held_bytes = simulate(profile).peak_bytes
    if held_bytes > peak_bytes:
        slack = (1 + profile.allocator_slack) * peak_bytes / held_bytes - 1
        profile = dataclasses.replace(profile, allocator_slack=max(slack, 0.0))
        held_bytes = simulate(profile).peak_bytes
    return dataclasses.replace(profile, transient_bytes=max(peak_bytes - held_bytes, 0))


def _slower(profile: StageProfile, factor: float) -> StageProfile:
    """The profile with all seconds of computing, not those of tiers, times a factor."""
    slower = with_numbers(
        lambda name, number: number * factor if name.endswith("_s") else number,
        dataclasses.replace(profile, tiers=()),
    )
    return dataclasses.replace(slower, tiers=profile.tiers)
