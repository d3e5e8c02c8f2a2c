# SPDX-License-Identifier: Apache-2.0
"""The results of a day as pictures: `draw`: the ROK curve and the timeline. Measures nothing.

The axes are those of the paper's curve (arXiv 2408.10013): peak memory of activations to the
right, the model's throughput upwards; a line for each strategy through its batches. Strategies look
as in all pictures; of what replays the marker is hollow, of what encodes it is half filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from check.gpu_day.results import Day
from check.gpu_day.spans import LANES
from megatron.offload.commands.drawing import (
    BLACK,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    RED,
    SKY,
    Label,
    Look,
    figure,
    label_points,
    look_of,
)
from megatron.offload.sizes import GIB

_LOOKS = {
    "none": look_of("off"),
    "checkpointing": look_of("recompute"),
    "recompute_host": look_of("recompute-host"),
    "half": look_of("suffix"),
    **{name: look_of(name) for name in ("keep", "replay", "host", "ssd", "tiered", "auto")},
    "compiled": Look(BLACK, "8"),
    "compiled_checkpointing": Look(RED, "<"),
    "compiled_host": Look(SKY, "D"),
    "compiled_auto": Look(GREEN, "*"),
    # Of other projects.
    "save_on_cpu": Look(GRAY, "v"),
    "save_on_cpu_pinned": Look(GRAY, "^"),
    "trl": Look(GRAY, "D"),
    "fsdp2_cpu": Look(GRAY, "s"),
    "fsdp2_cpu_checkpointing": Look(GRAY, "o"),
}
_FILLED = {"_replay": "none", "_int8": "left", "_int4": "right"}  # by the end of a way's name
_LANES = {"compute": GRAY, "to host": ORANGE, "from host": BLUE}
_NAMES = {
    "keep": "keep, with our hooks",
    "none": "keep",
    "half": "half of the layers on host, half kept",
    "checkpointing": "recompute",
    "compiled": "keep, compiled",
    "compiled_checkpointing": "recompute, compiled",
    "compiled_host": "host, inside of compiled graphs",
    "compiled_auto": "auto, inside of compiled graphs",
    "recompute_host": "recompute, inputs on host",
    "replay": "keep with replay",
    "host_replay": "host with replay",
    "auto_replay": "auto with replay",
    "replay_int8": "keep with replay, int8",
    "replay_int4": "keep with replay, int4",
    "host_int8": "host with replay, int8",
    "host_int4": "host with replay, int4",
    "auto_int8": "auto with replay, int8",
}


def draw(day: Day, folder: Path) -> list[Path]:
    """Draws what there are results for; the files."""
    made = [_rok(day, folder / "rok.png"), _timeline(day, folder / "timeline.png")]
    return [path for path in made if path is not None]


def points(day: Day) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Length of sequences, way and what was found, of all trainings of the stack."""
    for part in ("stack", "rok", "auto"):
        for result in day.of(part).values():
            if "step_s" in result.found:
                yield result.found["shape"]["seq"], result.found["way"], result.found


def _rok(day: Day, path: Path) -> Path | None:
    lines: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for seq, way, found in points(day):
        lines.setdefault(seq, {}).setdefault(way, []).append(found)
    if not lines:
        return None
    size = (9 * len(lines), 6.5)
    grid: dict[str, Any] = {"columns": len(lines), "squeeze": False, "layout": "constrained"}
    with figure(path, figsize=size, **grid) as (drawn, axes):
        for ax, (seq, ways) in zip(axes[0], sorted(lines.items()), strict=True):
            labels = _draw_length(ax, ways)
            ax.set_title(_title(day, next(iter(ways.values()))[0]["shape"], seq), fontsize=9)
            label_points(drawn, ax, labels)
    return path


def _draw_length(ax: Any, ways: dict[str, list[dict[str, Any]]]) -> list[Label]:
    """All that was measured with one length of sequences; what is to be written beside points."""
    labels = []
    several = len({one["shape"]["batch"] for found in ways.values() for one in found}) > 1
    for way, found in ways.items():
        found = sorted(found, key=lambda one: (one["shape"]["batch"], _memory_gib(one)))
        xs, ys = [_memory_gib(one) for one in found], [one["TFLOP_per_s"] for one in found]
        ax.plot(xs, ys, markersize=7, linewidth=1, label=_NAMES.get(way, way), **look_of_way(way))
        for x, y, one in zip(xs, ys, found, strict=True) if several else ():
            labels.append(Label(x, y, f"B{one['shape']['batch']}"))
    ax.set(xlabel="activation memory peak (GiB)", ylabel="model throughput (TFLOP/s)")
    most = max(one["TFLOP_per_s"] for found in ways.values() for one in found)
    ax.set_ylim(0, 1.08 * most)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, ncols=2)
    return labels


def look_of_way(way: str) -> dict[str, Any]:
    """Colour, marker and filling of a way, for `plot`."""
    end = next((one for one in _FILLED if way.endswith(one)), "")
    color, marker = _LOOKS.get(way.removesuffix(end), Look(GRAY, "p"))
    return {"color": color, "marker": marker, "fillstyle": _FILLED.get(end, "full")}


def _memory_gib(found: dict[str, Any]) -> float:
    return max(float(found["peak_bytes"] - found["base_bytes"]), 0.0) / GIB


def _title(day: Day, shape: dict[str, Any], seq: int) -> str:
    dry = "dry run, proves nothing: " if day.is_dry else ""
    layers = f"{shape['layers']} layers of {shape['hidden']}"
    return f"{dry}{layers}, {seq} tokens, bf16; B: sequences of a step; no recomputation counts"


def _timeline(day: Day, path: Path) -> Path | None:
    found = {n: r.found["spans"] for n, r in day.of("timeline").items() if "spans" in r.found}
    if not found:
        return None
    size = (12, 0.7 + 2.2 * len(found))
    grid: dict[str, Any] = {"rows": len(found), "squeeze": False, "layout": "constrained"}
    with figure(path, figsize=size, sharex=True, **grid) as (drawn, axes):
        for ax, (name, spans) in zip(axes[:, 0], found.items(), strict=True):
            for row, lane in enumerate(LANES):
                bars = [tuple(span) for span in spans["lanes"][lane]]
                ax.broken_barh(bars, (row + 0.1, 0.8), facecolor=_LANES[lane], edgecolor="none")
            ax.set_ylim(len(LANES), 0)
            ax.set_xlim(left=0)
            ax.set_yticks([row + 0.5 for row in range(len(LANES))], LANES)
            shares = ", ".join(f"{lane} {spans['busy'][lane]:.0%}" for lane in LANES)
            ax.set_title(f"{_NAMES.get(name, name)}; busy: {shares}", fontsize=9)
        axes[-1, 0].set_xlabel("ms of a step")
        drawn.suptitle("What the device computes and copies in a step", fontsize=10)
    return path
