# SPDX-License-Identifier: Apache-2.0
"""The cost of moving an optimizer's states, at the end of a run: `states_summary`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from megatron.offload.sizes import format_size
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.stats.endurance import Endurance


def states_summary(
    parts: Sequence[OptimizerStates],
    endurance: Endurance | None = None,
    written_bytes: Mapping[str, int] | None = None,
) -> str:
    """A few lines for the end of a run; empty if there was no step.

    Args:
        parts: states whose steps follow each other, such as those of experts and of the rest.
        endurance: the rating of the drives, with nothing counted yet; None: the summary of the
            activations reports the drives.
        written_bytes: to each drive since the states were offloaded, by all streams.
    """
    steps = [states.meter for states in parts if states.meter.num_steps]
    if not steps:
        return ""

    def total(name: str) -> float:
        return sum(meter.median(name) for meter in steps)

    read, written = (format_size(total(f"{name}_bytes")) for name in ("read", "written"))
    rows = [
        ("states", f"{format_size(sum(one.num_bytes for one in parts))}, {_window(parts)}"),
        ("read", f"{read} at {format_size(_rate(parts, 'reads'))}/s"),
        ("written", f"{written} at {format_size(_rate(parts, 'writes'))}/s"),
        (
            "step",
            f"{total('step_s'):.3f} s in the optimizer, of which it waited {total('wait_s'):.3f} s",
        ),
    ]
    if not total("read_bytes") and not total("written_bytes"):
        why = "the window has room for all states, so they stay in memory; a smaller one moves them"
        rows.append(("saved", f"nothing: {why} (--optimizer-state-window, window_bytes)"))
    if endurance is not None:
        seconds = max(meter.seconds for meter in steps)
        endurance.add_step(written_bytes or {}, seconds)
        rows += [("drive", line) for line in endurance.lines()]
    num_steps = max(len(meter.settled()) for meter in steps)
    heading = f"optimizer states on {_where(parts)}, median of {num_steps} steps:"
    return "\n".join([heading, *(f"  {name:<12}{text}" for name, text in rows)])


def _window(parts: Sequence[OptimizerStates]) -> str:
    window = format_size(sum(one.window_bytes for one in parts))
    peaks = [step.peak_bytes for one in parts for step in one.meter.settled()]
    return f"at most {format_size(max(peaks, default=0))} in memory (window {window})"


def _rate(parts: Sequence[OptimizerStates], direction: str) -> float:
    """Bytes a second over the last seconds of use."""
    rates = [
        sum(getattr(tier.statistics, direction).bytes_per_s or 0.0 for tier in states.tiers)
        for states in parts
    ]
    return statistics.fmean(rates)


def _where(parts: Sequence[OptimizerStates]) -> str:
    return " and ".join(dict.fromkeys(str(tier) for states in parts for tier in states.tiers))
