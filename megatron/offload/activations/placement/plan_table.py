# SPDX-License-Identifier: Apache-2.0
"""A plan as a person reads it: `plan_table`. Layers in a row with equal lines share them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import indent

from tabulate import tabulate

from megatron.offload.activations.placement.plan import Plan, PlannedPart, Prediction
from megatron.offload.activations.placement.policy import Placement
from megatron.offload.sizes import format_size

_HEADINGS = ("layers", "part", "each", "placement", "why")


def plan_table(plan: Plan, *, chunk_is: str = "chunk") -> str:
    """A heading, a line for each part of layers that look alike, predictions and notes.

    Args:
        plan: of a stage.
        chunk_is: what its chunks are: of layer-major steps a unit.
    """
    chunks = {one.chunk for one in plan.parts}
    rows = [_HEADINGS]
    for run in _runs(plan):
        first, last = run[0][0], run[-1][0]
        name = first.layer
        if len(run) > 1:
            name += f"-{last.layer.rpartition('.')[2]}"
        if len(chunks) > 1:
            name = f"{chunk_is} {first.chunk} {name}"
        for one in run[0]:
            size = format_size(one.movable_bytes)
            rows.append((name, one.part, size, _placement(one), one.reason))
            name = ""
    goal = f", {plan.goal}" if plan.goal else ""
    table = tabulate(rows, tablefmt="plain", disable_numparse=True)
    lines = [f"activation plan of stage {plan.stage}{goal}:", indent(table, "  ")]
    lines.append(f"  together: {_totals(plan)}")
    if plan.predicted is not None:
        lines.append(f"  predicted: {_describe(plan.predicted)}")
    if plan.fastest is not None:
        lines.append(f"  everything kept: {_describe(plan.fastest)}")
    if plan.lead_layers is not None:
        number = f"{plan.lead_layers} layer{'' if plan.lead_layers == 1 else 's'}"
        lines.append(f"  forward is launched at most {number} ahead of the device")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _totals(plan: Plan) -> str:
    """Parts and bytes of each placement, of one micro-batch, in the order of the table."""
    found: dict[str, list[int]] = {}
    for one in plan.parts:
        found.setdefault(_placement(one), []).append(one.movable_bytes)
    return "; ".join(
        f"{name} {len(sizes)} part{'' if len(sizes) == 1 else 's'}, {format_size(sum(sizes))}"
        for name, sizes in found.items()
    )


def _placement(one: PlannedPart) -> str:
    if not one.replays:
        return f"{one.placement.value}, not replayed"
    if not one.encodes:
        return f"{one.placement.value}, not encoded"
    if one.input is Placement.KEEP:
        return one.placement.value
    return f"{one.placement.value}, input to {one.input.value}"


def _runs(plan: Plan) -> Iterator[list[list[PlannedPart]]]:
    """The parts of each layer, by layers in a row that look alike."""
    layers = [list(g) for _, g in groupby(plan.parts, key=lambda one: (one.chunk, one.layer))]
    yield from (list(run) for _, run in groupby(layers, key=_look))


def _look(layer: list[PlannedPart]) -> tuple[object, ...]:
    block = layer[0].layer.rpartition(".")[0]
    cells = [(g.part, _placement(g), format_size(g.movable_bytes), g.reason) for g in layer]
    return (layer[0].chunk, block, *cells)


def _describe(one: Prediction) -> str:
    parts = [f"{one.step_s:.3f} s a step"]
    if one.stall_s or one.recompute_s:
        parts.append(f"{one.stall_s:.3f} s of them waiting, {one.recompute_s:.3f} s recomputing")
    parts.append(f"at most {format_size(one.peak_bytes)} of activations")
    if one.written_bytes:
        parts.append(f"{format_size(one.written_bytes)} written")
    return ", ".join(parts)
