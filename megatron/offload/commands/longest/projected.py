# SPDX-License-Identifier: Apache-2.0
"""The longest that should fit on hardware that is known by its data sheet: `projected`.

Seconds are worth no more than the assumptions behind them, see `planner/projection`. Nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from megatron.offload.commands.longest.search import Found, Measured
from megatron.offload.commands.plan.request import projections_of
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.projection import Projection, project
from megatron.offload.planner.simulator.instructions import (
    FIRST_TIER,
    KEEP,
    KEEP_ALL,
    RECOMPUTE_LAYER,
)
from megatron.offload.planner.simulator.options import from_tier
from megatron.offload.planner.simulator.timeline import Timeline, prediction_of

# What becomes of all layers, and on which tier.
_CHOICES = {
    "none": (KEEP_ALL, None),
    "checkpointing": (RECOMPUTE_LAYER, None),
    "checkpointing-host": (RECOMPUTE_LAYER, "host"),
    "ssd": (FIRST_TIER, "ssd"),
    "inputs": (RECOMPUTE_LAYER, "ssd"),
    "chunked": (RECOMPUTE_LAYER, "ssd"),
    "tiled": (RECOMPUTE_LAYER, "ssd"),
}
_CHUNKED, _TILED = ("chunked", "tiled"), ("tiled",)


def projected(args: argparse.Namespace) -> dict[str, Found]:
    """What each way comes to, by prediction. Raises ConfigurationError."""
    return {name: _of_way(args, name) for name in args.ways}


def held_bytes(args: argparse.Namespace) -> float:
    """Of the device memory, what weights, gradients and states take: of the fullest stage."""
    return max(one.weights_bytes for one in _lengthened(args, args.first, "none"))


def _of_way(args: argparse.Namespace, name: str) -> Found:
    try:
        least = _run(args, name, args.multiple_of)
    except _ImpossibleError as error:
        return Found([], 0, 0.0, failure=str(error))
    if least.peak_bytes > args.device_memory_budget:
        return Found([least], 0, 0.0, failure=f"{least.number} do not fit")
    fitting, low, most = [least], 1, max(args.most // args.multiple_of, 1)
    high = most + 1  # does not fit, or is not asked for
    while high - low > 1:  # twice as long each time, until one does not fit; then by halves
        middle = min(2 * low, most) if high > most else (low + high) // 2
        one = _run(args, name, middle * args.multiple_of)
        if one.peak_bytes <= args.device_memory_budget:
            fitting.append(one)
            low = middle
        else:
            high = middle
    return Found(fitting, fitting[-1].number, fitting[-1].peak_bytes)


def _run(args: argparse.Namespace, name: str, number: int) -> Measured:
    """What a run of this length should take: the fullest stage, and the slowest."""
    stages = _lengthened(args, number, name)
    predicted = [_predict(project(one), name) for one in stages]
    peaks = [
        peak + int(one.weights_bytes) for (peak, _), one in zip(predicted, stages, strict=True)
    ]
    step_s = max(seconds for _, seconds in predicted)
    return Measured(number, max(peaks), step_s, stages[0].tokens / step_s)


def _lengthened(args: argparse.Namespace, number: int, name: str) -> Sequence[Projection]:
    sizes = {"sequence": "seq_length", "batch": "micro_batch_size", "layers": "num_layers"}
    values = {**vars(args), sizes[args.by]: number}
    if (
        values["global_batch_size"] is None or args.by == "batch"
    ):  # a micro-batch of each copy of the model
        copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        copies = max((args.num_gpus or copy) // copy, 1)
        values["global_batch_size"] = values["micro_batch_size"] * copies
    found = projections_of(argparse.Namespace(**values))
    model = dataclasses.replace(
        found[0].model, chunked_loss=name in _CHUNKED, tiled_mlp=name in _TILED
    )
    return [dataclasses.replace(one, model=model) for one in found]


def _predict(profile: StageProfile, name: str) -> tuple[int, float]:
    """Bytes of activations at the peak, and seconds of a step."""
    choice, tier = _CHOICES[name]
    if tier is not None:
        names = [one.name for one in profile.tiers]
        if tier not in names:
            raise _ImpossibleError(f"there is no {tier} to move to")
        number = names.index(tier)
        if profile.tiers[number].capacity_bytes == 0:
            raise _ImpossibleError(f"optimizer states leave no room on the {tier}")
        choice = FIRST_TIER + number if choice == FIRST_TIER else from_tier(choice, number)
    timeline = Timeline(profile)
    chosen = timeline.choices.all(choice)
    if tier is not None and not chosen.any():  # too small to move
        chosen = timeline.choices.all(RECOMPUTE_LAYER if name != "ssd" else KEEP)
    found = prediction_of(timeline.cost(chosen))
    return found.peak_bytes, found.step_s


class _ImpossibleError(ConfigurationError):
    """A way that cannot be taken with these settings."""
