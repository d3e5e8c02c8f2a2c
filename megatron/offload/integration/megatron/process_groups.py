# SPDX-License-Identifier: Apache-2.0
"""The ranks that plan together in Megatron, and what they plan for: `consensus_of`, `stage_of`.

Tensor, context and expert parallel ranks send each other parts of the same layers, also when those
are recomputed. Pipeline stages and data-parallel replicas decide for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.offload.integration.megatron.layer_hooks import layer_names
from megatron.offload.integration.megatron.recomputable import why_not_recomputed
from megatron.offload.integration.megatron.schedule_hooks import pipeline_position
from megatron.offload.integration.megatron.selective_recompute import not_recomputed_alone
from megatron.offload.integration.process_groups import ProcessGroupConsensus
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_major.units import units_of
from megatron.offload.planner.online.consensus import RankConsensus, SingleRank
from megatron.offload.planner.online.stage import Stage
from megatron.offload.planner.profile.pipeline_schedule import layer_major_position


def consensus_of(device: torch.device) -> RankConsensus:
    """Makes the consensus among the ranks that hold parts of the same layers as this one.

    Args:
        device: where the groups' backend takes tensors.
    """
    if not dist.is_initialized():
        return SingleRank()
    groups = [parallel_state.get_tensor_and_context_parallel_group()]
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        groups.append(parallel_state.get_expert_model_parallel_group())
    return ProcessGroupConsensus(groups, device)


def stage_of(
    model_chunks: Sequence[torch.nn.Module],
    settings: Any,
    num_local_ranks: int,
    layer_major: LayerMajorConfig,
    *,
    by_operation: bool,
) -> Stage:
    """Describes this rank's stage of the pipeline, for the planner.

    Args:
        model_chunks: in the order of their numbers.
        settings: the model's `TransformerConfig`.
        num_local_ranks: ranks on this machine.
        layer_major: in which order steps run; units take the place of chunks.
        by_operation: layers hand over what each operation saved when the next one begins.
    """
    position = pipeline_position(settings)
    layers = [
        (number, name)
        for number, chunk in enumerate(model_chunks)
        for name in layer_names([chunk]).values()
    ]
    if layer_major.enabled:
        units = units_of([name for _, name in layers], layer_major.num_units)
        position = layer_major_position(units.values(), alternates=layer_major.alternates)
        layers = [(unit, name) for name, unit in units.items()]
    is_first = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    why_not = why_not_recomputed(settings)
    not_alone = {
        (name, group)
        for layer, name in layer_names(model_chunks).items()
        for group in not_recomputed_alone(layer)
    }
    return Stage(
        position,
        layers,
        why_not,
        is_first,
        num_local_ranks,
        not_alone,
        "operation" if by_operation else "layer",
    )
