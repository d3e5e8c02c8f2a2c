# SPDX-License-Identifier: Apache-2.0
"""A comparison as a person reads it and as JSON: `as_text`, `as_json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tabulate import tabulate

from megatron.offload.activations.placement.plan import Prediction
from megatron.offload.activations.placement.plan_table import plan_table
from megatron.offload.commands.plan.comparison import (
    CodecFigures,
    PlanComparison,
)
from megatron.offload.planner.profile.produced import in_words, produced_bytes_per_s
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.hardware import Hardware
from megatron.offload.planner.projection.projection import Projection
from megatron.offload.planner.projection.states import ProjectedStates
from megatron.offload.sizes import format_size
from megatron.offload.stats.endurance import format_span

_HEADINGS = ("strategy", "s/step", "of keep", "waits s", "recomputes s", "peak", "written/step")


def as_text(comparison: PlanComparison) -> str:
    """Several paragraphs, without a newline at the end."""
    return "\n\n".join(
        (
            "\n".join(_heading(comparison)),
            plan_table(
                dataclasses.replace(comparison.plan, predicted=None, fastest=None),
                chunk_is=comparison.profile.position.chunk_is,
            ),
            _comparison(comparison),
            _peak(comparison),
            "\n".join([*_drives(comparison), *_verdict(comparison)]),
        )
    )


def as_json(comparison: PlanComparison) -> str:
    """All figures, in bytes and seconds."""
    values = {
        "source": comparison.profile.source,
        "goal": comparison.plan.goal,
        "strategies": {
            name: dataclasses.asdict(one) if one is not None else None
            for name, one in comparison.strategies.items()
        },
        "peak_parts": dict(comparison.peak.parts),
        "produced_bytes_per_s": produced_bytes_per_s(comparison.profile.layers),
        "required_write_bytes_per_s": comparison.required_bytes_per_s,
        "plan_life_years": comparison.life_years,
        "replay": {
            "replayed_bytes": sum(layer.replayed_bytes for layer in comparison.profile.layers),
            "saved_bytes": sum(
                part.movable_bytes + part.resident_bytes
                for layer in comparison.profile.layers
                for part in layer.parts
            ),
            "replay_s": sum(layer.replay_s for layer in comparison.profile.layers),
        },
        "codec": None if comparison.codec is None else dataclasses.asdict(comparison.codec),
        "states": _states_as_json(comparison.request.states),
        "rok": [
            {"budget_bytes": budget, **dataclasses.asdict(one)} for budget, one in comparison.curve
        ],
        "rok_without_replay": [
            {"budget_bytes": budget, **dataclasses.asdict(one)}
            for budget, one in comparison.curve_without_replay
        ],
    }
    return json.dumps(values, indent=1) + "\n"


def _states_as_json(states: ProjectedStates | None) -> dict[str, float] | None:
    if states is None:
        return None
    return {
        "bytes": states.num_bytes,
        **dataclasses.asdict(states.predicted),
        "tokens": states.tokens,
        "tokens_to_hide": states.tokens_to_hide,
    }


def _heading(comparison: PlanComparison) -> list[str]:
    profile = comparison.profile
    lines = [f"{profile.source or 'measured profile'}, {_place(profile)}"]
    if (of := comparison.projection) is not None:
        lines += _described(of)
    lines += [
        f"{tier.name:<8}{tier.write_bytes_per_s / 1e9:.1f} GB/s to write, "
        f"{tier.read_bytes_per_s / 1e9:.1f} to read"
        for tier in profile.tiers
    ]
    made = produced_bytes_per_s(profile.layers)
    if made:
        taken = {tier.name: tier.write_bytes_per_s for tier in profile.tiers}
        lines.append(f"made    {in_words(made, taken)}")
    if (codec := comparison.codec) is not None:
        lines.append(_codec(codec))
    if (states := comparison.request.states) is not None:
        lines.append(_states(states))
    return lines


def _codec(codec: CodecFigures) -> str:
    return (
        f"codec   {codec.name}: of {format_size(codec.exact_bytes)} that layers save of a "
        f"micro-batch it makes {format_size(codec.stored_bytes)}; to encode and decode all of it "
        f"takes {codec.seconds:.3g} s beside {codec.layers_s:.3g} s of their passes; gradients are "
        "approximate"
    )


def _states(states: ProjectedStates) -> str:
    """Where they are, what they cost, and from how many tokens on they hide."""
    found = states.predicted
    hides = (
        "which hides"
        if states.tokens_to_hide <= states.tokens
        else f"at most 5 % of it from {states.tokens_to_hide / 1e3:,.0f} k tokens a step on"
    )
    return (
        f"states  {format_size(states.num_bytes)} on {states.tier.name}, of which a step moves "
        f"{format_size(found.moved_bytes)} out and in: {found.optimizer_s - states.update_s:.3g} s "
        f"of a step of {states.tokens / 1e3:,.0f} k tokens, {hides}"
    )


def _place(profile: StageProfile) -> str:
    position, number = profile.position, profile.num_micro_batches
    stage = f"pipeline stage {position.stage} of {position.num_stages}, "
    return (
        f"{stage if position.num_stages > 1 else ''}{len(profile.layers)} layers, "
        f"{number} micro-batch{'es' if number > 1 else ''} a step"
    )


def _described(of: Projection) -> list[str]:
    parallel, gpu = of.parallel, of.hardware.gpu
    room = of.activation_room_bytes
    left = f"{format_size(room)} left" if room > 0 else "nothing left"
    return [
        f"model   {of.model.parameters / 1e9:.3g} G parameters on {parallel.num_ranks} GPUs: "
        f"{parallel.tensor} tensor x {parallel.pipeline} pipeline x {parallel.data} data parallel",
        *_experts(of),
        f"memory  {format_size(gpu.memory_bytes)}; weights, gradients and optimizer "
        f"{format_size(of.weights_bytes)}, {left} for activations and all else",
        f"drives  {_drives_of(of.hardware)} for each GPU, behind {gpu.host_link}",
    ]


def _experts(of: Projection) -> list[str]:
    experts, parallel = of.model.experts, of.parallel
    if experts is None:
        return []
    return [
        f"experts {experts.number} in a layer, {experts.topk} for each token, on {parallel.expert} "
        "data-parallel ranks; taken to get equally many tokens each"
    ]


def _drives_of(hardware: Hardware) -> str:
    return f"{hardware.num_drives:g} x {hardware.drive.title}" if hardware.num_drives else "none"


def _comparison(comparison: PlanComparison) -> str:
    rows: list[Sequence[str]] = [_HEADINGS]
    rows += [_row(name, one, comparison.keep) for name, one in comparison.strategies.items()]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _peak(comparison: PlanComparison) -> str:
    """What the plan's peak is made of, by the names of a memory report."""
    parts = sorted(comparison.peak.parts.items(), key=lambda part: part[1], reverse=True)
    made_of = ", ".join(f"{name} {format_size(size)}" for name, size in parts if size)
    return f"the peak of this plan: {made_of or 'nothing'}"


def _row(name: str, one: Prediction | None, keep: Prediction) -> Sequence[str]:
    if one is None:
        return (name, *("-",) * (len(_HEADINGS) - 1))
    return (
        name,
        f"{one.step_s:.4g}",
        f"{one.step_s / keep.step_s:.3f}",
        f"{one.stall_s:.3g}",
        f"{one.recompute_s:.3g}",
        format_size(one.peak_bytes),
        format_size(one.written_bytes),
    )


def _verdict(comparison: PlanComparison) -> list[str]:
    """Whether the plan fits into the GPU, if it does not."""
    of, peak_bytes = comparison.projection, comparison.predicted.peak_bytes
    if of is None or peak_bytes <= of.activation_room_bytes:
        return []
    if of.activation_room_bytes <= 0:
        return [
            "THIS DOES NOT FIT: weights, gradients and optimizer alone take more memory than the "
            "GPU has; divide the model among more GPUs"
        ]
    room = format_size(of.activation_room_bytes)
    return [
        f"THIS DOES NOT FIT: the plan takes {format_size(peak_bytes)} and {room} are left; give "
        "--activation-memory-budget, a smaller micro-batch, or divide the model among more GPUs"
    ]


def _drives(comparison: PlanComparison) -> list[str]:
    rate = sum(tier.write_bytes_per_s for tier in comparison.profile.tiers)
    lines = [
        "to write everything behind compute takes "
        f"{comparison.required_bytes_per_s / 1e9:.1f} GB/s for each GPU "
        f"(bytes of a step by half its time); the tiers take {rate / 1e9:.1f}"
    ]
    written_bytes = comparison.ssd_written_bytes + comparison.states_written_bytes
    if comparison.states_written_bytes and comparison.ssd_written_bytes:
        lines.append(
            f"a step writes {format_size(comparison.ssd_written_bytes)} of activations and "
            f"{format_size(comparison.states_written_bytes)} of optimizer states to drives"
        )
    if written_bytes == 0:
        lines.append("this plan writes nothing to drives")
    elif (years := comparison.life_years) is not None:
        lines.append(
            f"drives last {format_span(years)} of training with this plan, by the bytes they are "
            "rated for"
        )
    return lines
