# SPDX-License-Identifier: Apache-2.0
"""What papers have published of trainings at scale, and the same projected: `WEAK`, `rows`.

Write bandwidth is S / (t / 2) and drive life E t / S, as in SSDTrain (arXiv 2408.10013): S bytes
saved by a GPU in a step of t seconds, E bytes that its drives are rated for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import (
    Projection,
    keep_step_s,
    project,
    saved_bytes,
)
from megatron.offload.stats.endurance import YEAR_S

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


def rows(drive: str, num_drives: float) -> dict[str, list[dict[str, Any]]]:
    """Models with published step times, and one batch on more and more GPUs."""
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
    }
