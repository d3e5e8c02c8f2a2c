#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots what gpu_day.py measured of one model: memory against speed, a point for each way to train.

    tools/plot/gpu.py docs/results/gpu/h100/results.json docs/results/gpu/h200/results.json \
        --output gpu.png

Left is less memory, up is faster. A panel for each GPU; ways that were not measured there are left
out. The numbers are those of the part `stack` at 4096 tokens, and of `auto` within its least
budget.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from megatron.offload.commands.drawing import Look, figure, look_of
from megatron.offload.documents import FAULTS, from_json, reason_of
from megatron.offload.sizes import GIB

_CODED, _PEER = "#CC79A7", "#999999"  # colours of approximate ways, and of other packages
_NONE = "stack/4096 none"


class Point(NamedTuple):
    """How a way to train is drawn.

    Attributes:
        label: beside the point.
        look: of the point.
        place: of the label, in points from it.
        side: of the label that is there.
    """

    label: str
    look: Look
    place: tuple[int, int]
    side: str = "left"


_POINTS = {
    _NONE: Point("all in memory", look_of("off"), (0, 8), "right"),
    "stack/4096 checkpointing": Point("gradient checkpointing", look_of("recompute"), (9, -13)),
    "stack/4096 replay": Point("replay", look_of("replay"), (9, -2)),
    "stack/4096 replay_int8": Point("replay, int8", Look(_CODED, "p"), (0, -17), "center"),
    "stack/4096 host_int8": Point("host, int8", Look(_CODED, "<"), (-3, 9), "right"),
    "stack/4096 host_replay": Point("host", look_of("host"), (9, -4)),
    "auto/25% of what layers save, with replay": Point("auto", look_of("auto"), (9, -10)),
    "stack/4096 compiled": Point("torch.compile", Look("#000000", "P"), (0, 8), "center"),
    "auto/50% of what layers save, inside of compiled graphs": Point(
        "torch.compile, auto", Look("#009E73", "P"), (0, 10), "center"
    ),
    "stack/4096 host": Point("host, replay off", Look(look_of("host").color, ">"), (9, -4)),
    "stack/4096 trl": Point("TRL's OffloadActivations", Look(_PEER, "D"), (9, -4)),
    "stack/4096 save_on_cpu_pinned": Point(
        "save_on_cpu(pin_memory=True)", Look(_PEER, "d"), (9, -4)
    ),
}


def plot(axes: Any, day: dict[str, Any]) -> None:
    """Draws one GPU. Raises KeyError: the training without anything was not measured there."""
    results = day["results"]
    none_s = results[_NONE]["found"]["step_s"]
    for name, point in _POINTS.items():
        result = results.get(name)
        if result is None or result["status"] != "ok":
            continue
        found = result["found"]
        x = (found["peak_bytes"] - found["base_bytes"]) / GIB
        y = none_s / found["step_s"]
        color, marker = point.look
        axes.plot(x, y, marker, color=color, markersize=9, zorder=3)
        axes.annotate(
            point.label,
            (x, y),
            point.place,
            textcoords="offset points",
            ha=point.side,
            color=color,
            fontsize=9,
        )
    axes.set_title(day["device"], fontsize=11)
    axes.set_xlabel("peak of activations, GiB")
    axes.set_ylabel("speed, of that with all in memory")
    axes.set_xlim(0, 17)
    axes.set_ylim(0, 1.12)
    axes.grid(alpha=0.3)


def main() -> int:
    """Draws all GPUs side by side; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="results.json of gpu_day.py")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args()
    columns = len(args.results)
    size = (6.2 * columns, 4.6)
    with figure(args.output, columns=columns, figsize=size, squeeze=False) as (drawn, grid):
        for axes, path in zip(grid.flat, args.results, strict=True):
            try:
                plot(axes, from_json(path.read_bytes()))
            except (OSError, *FAULTS) as error:
                parser.error(f"{path} is no result of gpu_day.py: {reason_of(error)}")
        drawn.suptitle("8 layers of Llama-3 8B, 2 sequences of 4096 tokens, bf16")
        drawn.tight_layout()
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
