# SPDX-License-Identifier: Apache-2.0
"""Which processes train together, as torch.distributed says: `rank`, `planned_stage`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.offload.integration.process_groups import ProcessGroupConsensus
from megatron.offload.planner.online.consensus import RankConsensus, SingleRank
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import PipelinePosition

_ONE_BY_ONE = PipelinePosition(num_stages=1, stage=0, num_chunks=1, group_size=1)


def rank() -> int:
    """This process's number among all that train together; 0 if it is alone."""
    return dist.get_rank() if _is_distributed() else 0


def local_world_size() -> int:
    """Processes of this training on this machine, as torchrun and DeepSpeed's launcher say."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def planned_stage(
    layers: Sequence[tuple[int, str]],
    device: torch.device,
    position: PipelinePosition = _ONE_BY_ONE,
    *,
    why_not_recomputed: str = "",
) -> tuple[RankConsensus, Stage]:
    """What the planner has to know: who plans together, and the layers.

    All ranks follow one plan: those of sharded data parallelism gather parameters together, also
    for what is recomputed.

    Args:
        layers: their units (0 where a step runs one micro-batch after the other) and names.
        device: where the process group's backend takes tensors.
        position: says in which order a step runs.
        why_not_recomputed: see `Stage`.
    """
    stage = Stage(
        position,
        layers,
        why_not_recomputed,
        speaks=rank() == 0,
        num_local_ranks=local_world_size(),
        hands_over="operation",
        divides_layers=False,
    )
    if not _is_distributed():
        return SingleRank(), stage
    return ProcessGroupConsensus([dist.group.WORLD], device), stage


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
