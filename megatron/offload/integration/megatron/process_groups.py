# SPDX-License-Identifier: Apache-2.0
"""The ranks that plan together in Megatron, and what they plan for: `consensus_of`, `stage_of`.

Tensor and context parallel ranks send each other parts of the same layers, also when those are
recomputed; with experts all ranks of a stage do. Otherwise each data-parallel replica and each
pipeline stage decides for itself.
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


def consensus_of(device: torch.device, settings: Any) -> RankConsensus:
    """Makes the consensus among the ranks that meet this one in collectives within layers.

    Args:
        device: where the groups' backend takes tensors.
        settings: the model's `TransformerConfig`.
    """
    if not dist.is_initialized():
        return SingleRank()
    # Experts are spread over replicas, by groups that tensor-parallel ones need not lie in (expert
    # tensor parallelism), and routers count tokens over all replicas (global_aux_loss).
    if getattr(settings, "num_moe_experts", None) or getattr(settings, "test_mode", False):
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_tensor_and_context_parallel_group()
    return ProcessGroupConsensus([group], device)


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
