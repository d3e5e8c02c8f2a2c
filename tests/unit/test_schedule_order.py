# SPDX-License-Identifier: Apache-2.0
"""The order of a stage's passes. That Megatron keeps to it is tested in tests/megatron."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition, pipeline_schedule


def text(position: PipelinePosition, num_microbatches: int) -> str:
    passes = pipeline_schedule(position, num_microbatches)
    chunks = position.num_chunks > 1
    return " ".join(
        f"{'B' if p.is_backward else 'F'}{p.micro_batch}{f'.{p.chunk}' if chunks else ''}"
        for p in passes
    )


@pytest.mark.parametrize(
    ("position", "num_microbatches", "order"),
    [
        (PipelinePosition(1, 0, 1, 1), 2, "F0 B0 F1 B1"),
        (PipelinePosition(2, 0, 1, 2), 4, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (PipelinePosition(2, 1, 1, 2), 2, "F0 B0 F1 B1"),
        (PipelinePosition(4, 0, 1, 4), 2, "F0 F1 B0 B1"),
        (
            PipelinePosition(2, 0, 2, 2),
            4,
            "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        ),
    ],
)
def test_the_order_is_that_of_the_schedule(
    position: PipelinePosition, num_microbatches: int, order: str
) -> None:
    assert text(position, num_microbatches) == order
