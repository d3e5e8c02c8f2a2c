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
from typing import Any

from megatron.offload.commands.drawing import GRAY, Label, Look, figure, label_points, look_of
from megatron.offload.documents import FAULTS, from_json, reason_of
from megatron.offload.sizes import GIB

_CODED = "#CC79A7"  # ways that are approximate
_NONE = "stack/4096 none"


_POINTS: dict[str, tuple[str, Look]] = {  # the words beside each, and how it looks
    _NONE: ("all in memory", look_of("off")),
    "stack/4096 checkpointing": ("gradient checkpointing", look_of("recompute")),
    "stack/4096 replay": ("replay", look_of("replay")),
    "stack/4096 replay_int8": ("replay, int8", Look(_CODED, "p")),
    "stack/4096 host_int8": ("host, int8", Look(_CODED, "<")),
    "stack/4096 host_replay": ("host", look_of("host")),
    "auto/25% of what layers save, with replay": ("auto", look_of("auto")),
    "stack/4096 compiled": ("torch.compile", Look(look_of("off").color, "P")),
    "auto/50% of what layers save, inside of compiled graphs": (
        "torch.compile, auto",
        Look(look_of("auto").color, "P"),
    ),
    "stack/4096 host": ("host, replay off", Look(look_of("host").color, ">")),
    "stack/4096 trl": ("TRL's OffloadActivations", Look(GRAY, "D")),
    "stack/4096 save_on_cpu_pinned": ("save_on_cpu(pin_memory=True)", Look(GRAY, "d")),
}


def plot(drawn: Any, axes: Any, day: dict[str, Any]) -> None:
    """Draws one GPU. Raises KeyError: the training without anything was not measured there."""
    results = day["results"]
    none_s = results[_NONE]["found"]["step_s"]
    labels = []
    for name, (words, look) in _POINTS.items():
        result = results.get(name)
        if result is None or result["status"] != "ok":
            continue
        found = result["found"]
        x = (found["peak_bytes"] - found["base_bytes"]) / GIB
        y = none_s / found["step_s"]
        axes.plot(x, y, look.marker, color=look.color, markersize=9, zorder=3)
        labels.append(Label(x, y, words, look.color))
    axes.set_title(day["device"], fontsize=11)
    axes.set_xlabel("peak of activations, GiB")
    axes.set_ylabel("speed, of that with all in memory")
    axes.set_xlim(0, 17)
    axes.set_ylim(0, 1.12)
    axes.grid(alpha=0.3)
    label_points(drawn, axes, labels)


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
    with figure(
        args.output, columns=columns, figsize=size, squeeze=False, layout="constrained"
    ) as (drawn, grid):
        drawn.suptitle("8 layers of Llama-3 8B, 2 sequences of 4096 tokens, bf16")
        for axes, path in zip(grid.flat, args.results, strict=True):
            try:
                plot(drawn, axes, from_json(path.read_bytes()))
            except (OSError, *FAULTS) as error:
                parser.error(f"{path} is no result of gpu_day.py: {reason_of(error)}")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
