# SPDX-License-Identifier: Apache-2.0
"""The order of a pipeline stage's forward and backward passes: `pipeline_schedule`.

The integration follows it to know which backward pass comes next, the planner to simulate a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from megatron.offload.layer_major.order import micro_batch_order


class Pass(NamedTuple):
    """One forward or backward pass of a stage."""

    is_backward: bool
    chunk: int
    micro_batch: int


class PipelinePosition(NamedTuple):
    """What the order of a stage's passes depends on."""

    num_stages: int
    stage: int
    num_chunks: int
    group_size: int  # micro-batches that a chunk runs in a row, with several chunks
    # The order of a layer-major step's micro-batches. Its units are the chunks, its stage the only
    # one. Empty: chunks are those of a pipeline.
    units: Literal["", "ascending", "alternating"] = ""

    @property
    def chunk_is(self) -> str:
        """What people call a chunk of this stage."""
        return "unit" if self.units else "chunk"


def layer_major_position(units: Iterable[int], *, alternates: bool) -> PipelinePosition:
    """The position of the only stage of a model whose layers are in these units."""
    order: Literal["ascending", "alternating"] = "alternating" if alternates else "ascending"
    return PipelinePosition(1, 0, max(units) + 1, 1, order)


def pipeline_schedule(position: PipelinePosition, num_microbatches: int) -> list[Pass]:
    """The passes of one step of one stage, in the order of Megatron's schedules.

    Without pipelining a micro-batch's backward follows its forward at once. With it, stages begin
    with forward passes, more of them the earlier the stage, then do one of each in turn (1F1B;
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021).
    In layer-major steps each unit runs all micro-batches before the next one.
    """
    if position.units:
        return list(_layer_major(position, num_microbatches))
    stages, stage, chunks, group, _ = position
    group = group if chunks > 1 else num_microbatches
    order = [
        (chunk, micro_batch)
        for first in range(0, num_microbatches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, num_microbatches))
    ]
    num_warm_up = 0
    if stages > 1:
        later = stages - stage - 1
        num_warm_up = later if chunks == 1 else 2 * later + (chunks - 1) * group
    num_warm_up = min(num_warm_up, len(order))
    forward = [Pass(False, *place) for place in order]
    backward = [Pass(True, chunks - 1 - chunk, micro_batch) for chunk, micro_batch in order]
    passes = forward[:num_warm_up]
    for one in zip(forward[num_warm_up:], backward, strict=False):
        passes.extend(one)
    return passes + backward[len(order) - num_warm_up :]


def _layer_major(position: PipelinePosition, num_microbatches: int) -> Iterator[Pass]:
    """As `layer_major.schedule.LayerMajorSchedule` runs them."""
    last, alternates = position.num_chunks - 1, position.units == "alternating"

    def order(turn: int) -> Iterator[int]:
        return iter(micro_batch_order(turn, num_microbatches, alternates=alternates))

    for unit in range(last):
        yield from (Pass(False, unit, one) for one in order(unit))
    yield from (Pass(backward, last, one) for one in order(last) for backward in (False, True))
    for turn, unit in enumerate(reversed(range(last)), last + 1):
        yield from (Pass(True, unit, one) for one in order(turn))
