# SPDX-License-Identifier: Apache-2.0
"""Whether a layer-major step has run unit by unit: `StepOrder`. The planner asks after each step.

Some steps run one micro-batch after the other, to count random numbers. They show nothing of the
time and the memory of those that are planned for.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.offload.planner.online.consensus import RankConsensus
from megatron.offload.planner.profile.pipeline_schedule import (
    Pass,
    PipelinePosition,
    pipeline_schedule,
)


class StepOrder:
    """Compares the passes of steps with those that are planned for, on all ranks alike.

    Args:
        position: says which order that is.
        consensus: of the ranks that plan together.
    """

    def __init__(self, position: PipelinePosition, consensus: RankConsensus) -> None:
        self._position = position
        self._consensus = consensus

    def was_kept(self, order: Sequence[Pass], *, by_all: bool) -> bool:
        """Whether a step was run so. All ranks ask after the same steps.

        Args:
            order: of this rank's passes.
            by_all: on all ranks of the run, not only of the group: they make the first plan
                together, at the same step.
        """
        num_micro_batches = len({one.micro_batch for one in order})
        kept = list(order) == pipeline_schedule(self._position, num_micro_batches)
        if by_all:
            return all(self._consensus.of_all(kept))
        (any_has_not,) = self._consensus.largest([float(not kept)])
        return not any_has_not
