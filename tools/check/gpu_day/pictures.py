# SPDX-License-Identifier: Apache-2.0
"""The results of a day as pictures: `draw`: the ROK curve and the timeline. Measures nothing.

The axes are those of the paper's curve (arXiv 2408.10013): peak memory of activations to the
right, the model's throughput upwards; a line for each strategy through its batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from check.gpu_day.results import Day
from check.gpu_day.spans import LANES
from megatron.offload.sizes import GIB

_DPI = 130
_MARKERS = "os^vDP*"
_NAMES = {
    "keep": "keep, with our hooks",
    "none": "keep",
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
    import matplotlib

    matplotlib.use("Agg")
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
    import matplotlib.pyplot as plt

    looks = _looks(way for ways in lines.values() for way in ways)
    figure, axes = plt.subplots(1, len(lines), figsize=(8 * len(lines), 5.5), squeeze=False)
    for ax, (seq, ways) in zip(axes[0], sorted(lines.items()), strict=True):
        several = len({one["shape"]["batch"] for found in ways.values() for one in found}) > 1
        for way, found in ways.items():
            found = sorted(found, key=lambda one: (one["shape"]["batch"], _memory_gib(one)))
            xs, ys = [_memory_gib(one) for one in found], [one["TFLOP_per_s"] for one in found]
            ax.plot(xs, ys, markersize=7, linewidth=1, label=_NAMES.get(way, way), **looks[way])
            for x, y, one in zip(xs, ys, found, strict=True) if several else ():
                ax.annotate(f"B{one['shape']['batch']}", (x, y), fontsize=7, xytext=(3, 3),
                            textcoords="offset points")  # fmt: skip
        ax.set(xlabel="activation memory peak (GiB)", ylabel="model throughput (TFLOP/s)")
        ax.set_title(_title(day, next(iter(ways.values()))[0]["shape"], seq), fontsize=9)
        most = max(one["TFLOP_per_s"] for found in ways.values() for one in found)
        ax.set_ylim(0, 1.08 * most)
        ax.set_xlim(left=0)
        ax.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
    return path


def _looks(ways: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each way, the same in all panels."""
    import matplotlib.pyplot as plt

    colors = plt.get_cmap("tab20")
    return {
        way: {"color": colors(number % 20), "marker": _MARKERS[number % len(_MARKERS)]}
        for number, way in enumerate(dict.fromkeys(ways))
    }


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
    import matplotlib.pyplot as plt

    size = (12, 2.2 * len(found))
    figure, axes = plt.subplots(len(found), 1, figsize=size, sharex=True, squeeze=False)
    for ax, (name, spans) in zip(axes[:, 0], found.items(), strict=True):
        for row, lane in enumerate(LANES):
            ax.broken_barh([tuple(span) for span in spans["lanes"][lane]], (row, 0.8))
        ax.set_ylim(0, len(LANES))
        ax.set_yticks([row + 0.4 for row in range(len(LANES))], LANES)
        ax.set_title(f"{name}: compute busy {spans['busy']['compute']:.0%}", fontsize=9)
    axes[-1, 0].set_xlabel("ms of a step")
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
    return path
