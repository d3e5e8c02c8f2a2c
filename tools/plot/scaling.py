# SPDX-License-Identifier: Apache-2.0
"""What offload of all activations asks of drives as models and clusters grow.

    tools/plot/scaling.py --json scaling.json

Prints three tables in Markdown: models and layouts with published step times (arXiv 2205.05198,
table 5); the same batch on more GPUs (layouts of arXiv 2104.04473, table 2); single layers without
tensor parallelism. Write bandwidth is S / (t / 2) and drive life E t / S, as in SSDTrain
(arXiv 2408.10013): S bytes saved by a GPU in a step of t seconds, E bytes that its drives are rated
for. No drive is taken to endure more than its data sheet says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware, names
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import (
    Projection,
    keep_step_s,
    project,
    saved_bytes,
)
from megatron.offload.stats.endurance import YEAR_S, format_span

# Published: seconds of a step with sequence parallelism and selective recomputation on A100 80 GB.
WEAK = (
    ("22B", (48, 6144, 64), Parallelism(4, 4, 8, 1, 1, 1, True), 1.10),
    ("175B", (96, 12288, 96), Parallelism(1, 64, 8, 8, 3, 1, True), 13.75),
    ("530B", (105, 20480, 128), Parallelism(1, 280, 8, 35, 3, 1, True), 37.83),
    ("1T", (128, 25600, 160), Parallelism(1, 512, 8, 64, 1, 1, True), 71.49),
)
# One batch on more and more GPUs: data-parallel ranks of a copy of the model.
STRONG = tuple(
    (name, shape, Parallelism(1, batch, 8, pipeline, 1, data, True))
    for name, shape, batch, pipeline, ranks in (
        ("175B", (96, 12288, 96), 1536, 12, (4, 8, 16)),
        ("530B", (105, 20480, 128), 2240, 35, (2, 4, 8)),
    )
    for data in ranks
)
SINGLE_LAYER = tuple((gpu, hidden) for gpu in ("a100", "h100") for hidden in (4096, 8192, 16384))
SEQ_LENGTH, VOCAB_SIZE = 2048, 51200


def transformer(shape: tuple[int, int, int], **more: Any) -> Transformer:
    """A GPT of these papers: its layers, hidden size and heads."""
    layers, hidden, heads = shape
    sizes = {"seq_length": SEQ_LENGTH, "vocab_size": VOCAB_SIZE, **more}
    return Transformer(layers, hidden, heads, **sizes)


def as_published(shape: tuple[int, int, int]) -> Transformer:
    """With dropout, and attention scores made again in backward instead of flash attention."""
    return transformer(
        shape,
        dtype="fp16",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        flash_attention=False,
        selective_recompute=True,
    )


def row(name: str, of: Projection, published_step_s: float | None = None) -> dict[str, Any]:
    """Figures of one projection, in bytes and seconds."""
    profile = project(of)
    saved, step_s = saved_bytes(profile), keep_step_s(profile)
    without = dataclasses.replace(of.parallel, sequence_parallel=False)
    numbers = {
        "model": name,
        "gpus": of.parallel.num_ranks,
        "step_s": step_s,
        "published_step_s": published_step_s,
        "saved_bytes": saved,
        "saved_without_sequence_parallelism_bytes": saved_bytes(
            project(dataclasses.replace(of, parallel=without))
        ),
        "write_bytes_per_s": 2 * saved / step_s,
        "life_years": of.hardware.rated_bytes * step_s / saved / YEAR_S,
    }
    if published_step_s is not None:
        numbers["write_at_published_step_bytes_per_s"] = 2 * saved / published_step_s
    return numbers


def single_layer(gpu: GpuSpec, hidden: int, drive: DriveSpec) -> dict[str, Any]:
    """Bandwidth that hides one layer's writes behind it, and how near to peak it runs."""
    model = transformer((1, hidden, hidden // 128))
    layer = project(Projection(model, Parallelism(), Hardware(gpu, drive))).layers[0]
    seconds = layer.forward_s + layer.backward_s
    flops = 3 * 2 * SEQ_LENGTH * model.layer_parameters
    return {
        "gpu": gpu.name,
        "hidden": hidden,
        "write_bytes_per_s": 2 * layer.movable_bytes / seconds,
        "matrix_flops_of_peak": flops / seconds / gpu.peak_flops(model.dtype),
    }


def tables(drive: str, num_drives: float) -> dict[str, list[dict[str, Any]]]:
    """The rows of all three tables."""
    hardware = Hardware(GpuSpec.load("a100"), DriveSpec.load(drive), num_drives)
    return {
        "weak": [
            row(name, Projection(as_published(shape), parallel, hardware), published)
            for name, shape, parallel, published in WEAK
        ],
        "strong": [
            row(name, Projection(transformer(shape, hidden_dropout=0.1), parallel, hardware))
            for name, shape, parallel in STRONG
        ],
        "single_layer": [
            single_layer(GpuSpec.load(gpu), hidden, hardware.drive) for gpu, hidden in SINGLE_LAYER
        ],
    }


def markdown(result: dict[str, list[dict[str, Any]]]) -> str:
    """The tables in Markdown."""
    weak = [
        (
            one["model"],
            one["gpus"],
            f"{one['step_s']:.2f}",
            f"{one['published_step_s']:.2f}",
            f"{one['step_s'] / one['published_step_s'] - 1:+.1%}",
            _terabytes(one["saved_bytes"]),
            f"{one['write_bytes_per_s'] / 1e9:.1f}",
            f"{one['write_at_published_step_bytes_per_s'] / 1e9:.1f}",
            format_span(one["life_years"]),
        )
        for one in result["weak"]
    ]
    strong = [
        (
            one["model"],
            one["gpus"],
            f"{one['step_s']:.1f}",
            _terabytes(one["saved_bytes"]),
            _terabytes(one["saved_without_sequence_parallelism_bytes"]),
            f"{one['write_bytes_per_s'] / 1e9:.1f}",
            format_span(one["life_years"]),
        )
        for one in result["strong"]
    ]
    single = [
        (
            one["gpu"],
            one["hidden"],
            f"{one['write_bytes_per_s'] / 1e9:.0f}",
            f"{one['matrix_flops_of_peak']:.0%}",
        )
        for one in result["single_layer"]
    ]
    return "\n\n".join(
        (
            _table(
                "model|GPUs|step s|published|off by|saved TB/step|write GB/s"
                "|at the published step|drives last",
                weak,
            ),
            _table(
                "model|GPUs|step s|saved TB/step|without sequence parallelism|write GB/s"
                "|drives last",
                strong,
            ),
            _table("GPU|hidden size|write GB/s|matrix FLOP/s of peak", single),
        )
    )


def _terabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.3f}"


def _table(headings: str, rows: Iterable[Sequence[object]]) -> str:
    names = headings.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes them; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ssd", default="p5800x", choices=names("drives"), help="of each GPU")
    parser.add_argument("--ssds", type=float, default=4, help="drives of each GPU; default: 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    args = parser.parse_args(argv)
    result = tables(args.ssd, args.ssds)
    print(markdown(result))
    if args.json:
        args.json.write_text(
            json.dumps({"ssd": args.ssd, "ssds": args.ssds, **result}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
