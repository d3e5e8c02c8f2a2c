# SPDX-License-Identifier: Apache-2.0
"""Tokens a second over tokens a step, in both orders: `draw_schedules`.

Published points are drawn where model and hardware are those of the command.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from megatron.offload.commands.drawing import figure, look_of
from megatron.offload.commands.plan.schedules import Schedules, pairs_of


class Published(NamedTuple):
    """A measurement of others. Tokens are those of all ranks."""

    name: str
    gpu: str
    num_gpus: int
    num_layers: int
    hidden_size: int
    tokens: int
    seconds: float


# A run of DeepSpeed's ZeRO-Infinity on one DGX-2 that its log describes: 50.356 G parameters,
# 298.91 s, of them 92.64 in the optimizer, 35.88 TFLOP/s for each GPU as DeepSpeed counts (8 for
# each parameter and token), which are 26 sequences of 1024 tokens for each.
_SOURCE = "deepspeedai/DeepSpeed#1776"
_TOKENS = 16 * 26 * 1024
PUBLISHED = (
    Published(f"ZeRO-Infinity, {_SOURCE}", "v100", 16, 62, 8192, _TOKENS, 298.91),
    Published("the same without its optimizer's step", "v100", 16, 62, 8192, _TOKENS, 206.27),
)


_ORDERS = ("s--", "o-"), (8, 5), ("one after the other", "layer-major")


def published_of(schedules: Schedules) -> list[Published]:
    """Those with this model on this hardware."""
    of = schedules.of.of
    own = (of.hardware.gpu.name, of.parallel.num_ranks, of.model.num_layers, of.model.hidden_size)
    return [one for one in PUBLISHED if one[1:5] == own]


def draw_schedules(schedules: Schedules, path: Path) -> None:
    """Draws a file, with parameters on each tier that there is. Raises OSError.

    What does not fit into the GPU has no marker.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure(path, figsize=(7, 4.5), layout="constrained") as (_, axes):
        _draw(axes, schedules)


def _draw(axes: Any, schedules: Schedules) -> None:
    streamed, hardware = schedules.of, schedules.of.of.hardware
    for tier in ("host", "ssd") if hardware.num_drives else ("host",):
        pairs = schedules.pairs
        if tier != streamed.parameters_on:
            pairs = pairs_of(dataclasses.replace(streamed, parameters_on=tier))
        for costs, style, size, name in zip(zip(*pairs, strict=True), *_ORDERS, strict=True):
            axes.plot(
                [one.tokens for one in costs],
                [one.tokens_per_s for one in costs],
                style,
                color=look_of(tier).color,
                markersize=size,
                fillstyle="none",
                label=f"{name}, parameters on {tier}",
                markevery=[one.peak_bytes <= hardware.gpu.memory_bytes for one in costs],
            )
    for one, marker in zip(published_of(schedules), ("*", "x"), strict=False):
        axes.plot(one.tokens, one.tokens / one.seconds, marker, color="k", label=one.name)
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("tokens a second")
    axes.set_title(_title(schedules), fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _title(schedules: Schedules) -> str:
    of = schedules.of.of
    return (
        f"{of.model.parameters / 1e9:.3g} G parameters on {of.parallel.num_ranks} x "
        f"{of.hardware.gpu.title}, projected"
    )
