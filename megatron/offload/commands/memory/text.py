# SPDX-License-Identifier: Apache-2.0
"""What the peak of a step is made of, as tables: `as_text`. The command prints it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from megatron.offload.activations.stats.memory_parts import (
    BETWEEN,
    OUTSIDE_OF_LAYERS,
    PredictedPeak,
    StepMemory,
    layer_and_part,
)
from megatron.offload.sizes import format_size
from megatron.offload.stats.history import replay_line

_MOST_LAYERS = 5


def as_text(steps: Sequence[StepMemory], shown: StepMemory, predicted: PredictedPeak | None) -> str:
    """Several paragraphs, without a newline at the end.

    Args:
        steps: of the report.
        shown: the one of them that is explained.
        predicted: of the plan that it followed; None: it followed none, or it is not known.
    """
    paragraphs = [_heading(steps, shown), _parts(shown, predicted)]
    if shown.peak.layers:
        paragraphs.append(_layers(shown, predicted))
    if shown.reusable_bytes is not None:
        reserved = ""
        if shown.reserved_bytes is not None:
            reserved = f", of {format_size(shown.reserved_bytes)} reserved in all"
        held = format_size(shown.reusable_bytes)
        paragraphs.append(
            f"Beside these the allocator held {held} for reuse{reserved}, fragments among them."
        )
    if shown.replayed_bytes:
        line = replay_line(shown.replayed_bytes, shown.unreplayed)
        paragraphs.append(f"Of what autograd saves in the step: {line}.")
    return "\n\n".join(paragraphs)


def _heading(steps: Sequence[StepMemory], shown: StepMemory) -> str:
    peaks = ", ".join(f"step {one.step} {format_size(one.peak_bytes)}" for one in steps)
    phase, where = shown.peak.phase, shown.peak.where
    at = where if where == OUTSIDE_OF_LAYERS else f"at {where}"
    place = f"in a {phase} pass, {at}" if phase else "between two passes"
    return (
        f"rank {shown.rank}, most device memory above the state before the step: {peaks}\n"
        f"step {shown.step} after {shown.peak.time_s:.3f} s, {place}:"
    )


def _parts(shown: StepMemory, predicted: PredictedPeak | None) -> str:
    """The parts of the peak, largest first; without those that there is nothing of."""
    found = shown.peak_parts
    wanted = {} if predicted is None else predicted.parts
    rows = []
    for name in sorted(found, key=lambda name: found[name], reverse=True):
        if found[name] or wanted.get(name):
            # Nothing comes between samples of a simulation: see REST there.
            of_plan = "" if name == BETWEEN else format_size(wanted.get(name, 0))
            rows.append([name, format_size(found[name]), _share(found[name], shown), of_plan])
    total_bytes = sum(wanted.values())
    rows.append(["together", format_size(shown.peak_bytes), "100 %", format_size(total_bytes)])
    return _table(["what", "bytes", "of the peak"], rows, predicted)


def _layers(shown: StepMemory, predicted: PredictedPeak | None) -> str:
    """The layers that have most at the peak, and what their parts have of it."""
    found: collections.Counter[str] = collections.Counter()
    parts: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for name, num_bytes in shown.peak.layers.items():
        layer, part = layer_and_part(name)
        found[layer] += num_bytes
        if part:
            parts[layer][part] = num_bytes
    wanted = {} if predicted is None else predicted.layers
    rows = [
        [name, format_size(num_bytes), _list(parts[name]), format_size(wanted.get(name, 0))]
        for name, num_bytes in found.most_common(_MOST_LAYERS)
    ]
    return _table(["layer", "bytes", "parts"], rows, predicted)


def _table(heading: list[str], rows: list[list[str]], predicted: PredictedPeak | None) -> str:
    """With a last column of what was predicted, if anything was."""
    if predicted is None:
        rows = [row[:-1] for row in rows]
    else:
        heading = [*heading, "predicted"]
    return tabulate(rows, headers=heading, tablefmt="plain", disable_numparse=True)


def _list(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_size(size)}" for name, size in sorted(parts.items()))


def _share(num_bytes: int, shown: StepMemory) -> str:
    return f"{100 * num_bytes / shown.peak_bytes:.0f} %" if shown.peak_bytes else "-"
