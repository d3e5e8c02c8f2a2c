# SPDX-License-Identifier: Apache-2.0
"""Steps whose parameters stream, in both orders: `schedules_of`, as text and JSON.

For `megatron-offload plan --hardware ... --parameter-offload`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from megatron.offload.commands.plan.request import flag_of, projections_of
from megatron.offload.errors import ConfigurationError
from megatron.offload.layer_major.units import units_of
from megatron.offload.planner.projection.streamed import (
    ScheduleCost,
    StreamedProjection,
    pays_from,
)
from megatron.offload.sizes import format_size

_GOALS = ("activation_memory_budget", "activation_offload_max_slowdown")
Pairs = tuple[tuple[ScheduleCost, ScheduleCost], ...]  # one after the other, layer-major

_MOST_WORK = 200_000  # layers times micro-batches: some ten seconds


@dataclass(frozen=True)
class Schedules:
    """What is projected, and what it costs with more and more micro-batches."""

    of: StreamedProjection
    pairs: Pairs


def schedules_of(args: argparse.Namespace) -> Schedules:
    """What the flags ask for. Raises ConfigurationError."""
    refused = ("profile", "output", "rok", *_GOALS)
    given = [flag_of(name) for name in refused if getattr(args, name) is not None]
    if given:
        raise ConfigurationError(
            f"--parameter-offload compares steps and makes no plan; leave out {', '.join(given)}"
        )
    if args.parameter_offload_live_units < 2:
        raise ConfigurationError(
            "--parameter-offload-live-units 1 leaves no room to read ahead; give at least 2"
        )
    if args.gradient_offload == "on" and args.optimizer_state_offload == "off":
        raise ConfigurationError(
            "--gradient-offload on has all gradients in memory in the step of an optimizer whose "
            "states stay there; give --optimizer-state-offload"
        )
    if args.activation_boundary != "keep" and args.activation_offload == "off":
        raise ConfigurationError(
            f"--activation-boundary {args.activation_boundary} needs --activation-offload ssd or "
            "host; give one of them, or --activation-boundary keep"
        )
    divided = args.data_parallel_sharding_strategy == "optim_grads_params"
    if divided:
        args.use_distributed_optimizer = True
    stages = projections_of(args)
    if len(stages) > 1:
        raise ConfigurationError(
            "--parameter-offload compares steps without pipeline stages; leave out "
            "--pipeline-model-parallel-size"
        )
    layers, micro_batches = stages[0].model.num_layers, stages[0].parallel.num_micro_batches
    if layers * micro_batches > _MOST_WORK:
        raise ConfigurationError(
            f"steps of {layers} layers and {micro_batches} micro-batches take minutes to simulate, "
            f"pass by pass; at most {_MOST_WORK} of both together are; give a smaller "
            "--global-batch-size, or more --num-gpus"
        )
    of = StreamedProjection(
        stages[0],
        args.parameter_offload,
        num_units=args.layer_major_units,
        live_units=args.parameter_offload_live_units,
        recomputes=args.activation_recompute_layers == "all",
        activations_on=None if args.activation_offload == "off" else args.activation_offload,
        boundary_on=None if args.activation_boundary == "keep" else args.activation_boundary,
        divided=divided,
        gradients_leave=args.gradient_offload == "on",
    )
    return Schedules(of, pairs_of(of))


def pairs_of(of: StreamedProjection) -> Pairs:
    """Costs with 1, 2, 4 micro-batches and so on, up to those of the global batch."""
    most = of.of.parallel.num_micro_batches
    counts = sorted({most, *(1 << n for n in range(most.bit_length()))})
    return tuple(
        (of.cost(count, layer_major=False), of.cost(count, layer_major=True)) for count in counts
    )


def as_text(schedules: Schedules) -> str:
    """Several paragraphs, without a newline at the end."""
    return "\n\n".join(
        ("\n".join(_heading(schedules.of)), _table(schedules), "\n".join(_verdict(schedules)))
    )


def as_json(schedules: Schedules) -> str:
    """All figures, in bytes and seconds."""
    orders = ("one_after_the_other", "layer_major")
    steps = [dict(zip(orders, map(_figures, pair), strict=True)) for pair in schedules.pairs]
    return json.dumps({"pays_from": pays_from(schedules.pairs), "steps": steps}, indent=1) + "\n"


def _figures(one: ScheduleCost) -> dict[str, Any]:
    derived = {name: getattr(one, name) for name in ("step_s", "tokens_per_s", "moved_bytes")}
    return derived | dataclasses.asdict(one)


def _heading(streamed: StreamedProjection) -> list[str]:
    of, layers = streamed.of, streamed.of.model.num_layers
    tier = of.hardware.tier(streamed.parameters_on)
    num_units = len(set(units_of(range(layers), streamed.num_units).values()))
    divided = ", divided among all" if streamed.divided else ""
    activations = "inputs of layers" if streamed.recomputes else "activations"
    gradients = f"; gradients on {streamed.parameters_on}" if streamed.gradients_leave else ""
    where = f"on {streamed.activations_on}" if streamed.activations_on else "in device memory"
    boundary = f"; what waits between units on {streamed.boundary_on}" * bool(streamed.boundary_on)
    return [
        f"projected for {of.parallel.num_ranks} x {of.hardware.gpu.title}",
        f"model   {of.model.parameters / 1e9:.3g} G parameters, {layers} layers; "
        f"micro-batches of {of.parallel.micro_batch_size * of.model.seq_length:,} tokens a rank",
        f"moves   parameters on {streamed.parameters_on}{divided}: "
        f"{tier.write_bytes_per_s / 1e9:.1f} GB/s to write, {tier.read_bytes_per_s / 1e9:.1f} to "
        f"read; {streamed.live_units} units live; {activations} {where}{boundary}{gradients}",
        f"units   {num_units} in layer-major steps, {layers} in the others",
    ]


def _table(schedules: Schedules) -> str:
    room = schedules.of.of.hardware.gpu.memory_bytes
    names = ("tokens/s", "waits for", "moved/step", "peak")
    rows: list[Sequence[str]] = [
        ("", "", "one after the other", "", "", "", "layer-major", "", "", ""),
        ("micro-batches", "tokens/step", *names, *names),
    ]
    for alone, together in schedules.pairs:
        first = str(alone.micro_batches), f"{alone.tokens:,}"
        rows.append((*first, *_cells(alone, room), *_cells(together, room)))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _cells(one: ScheduleCost, room: float) -> Sequence[str]:
    what, seconds = max(one.waits_s.items(), key=lambda wait: wait[1])
    share = seconds / one.step_s
    return (
        f"{one.tokens_per_s:,.0f}",
        f"{what} {share:.0%}" if share >= 0.01 else "-",
        format_size(one.moved_bytes),
        format_size(one.peak_bytes) + (" OVER" if one.peak_bytes > room else ""),
    )


def _verdict(schedules: Schedules) -> list[str]:
    """From where on layer-major pays, and what its memory is."""
    alone, together = schedules.pairs[-1]
    room = schedules.of.of.hardware.gpu.memory_bytes
    tokens, factor = pays_from(schedules.pairs), alone.step_s / together.step_s
    pays = (
        f"layer-major does not pay: with {alone.tokens:,} tokens a step it is {factor:.3f} times "
        "as fast"
        if tokens is None
        else f"layer-major pays from {tokens:,} tokens a step on, by more than 1 %; with "
        f"{alone.tokens:,} it is {factor:.2f} times as fast"
    )
    if any(two.peak_bytes > room for _, two in schedules.pairs):
        pays += f"; OVER is more than the GPU's {format_size(int(room))}"
    parts = sorted(together.peak.items(), key=lambda part: part[1], reverse=True)
    made_of = ", ".join(f"{name} {format_size(size)}" for name, size in parts if size)
    return [pays, f"its peak then: {made_of}"]
