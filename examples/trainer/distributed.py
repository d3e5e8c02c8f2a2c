# SPDX-License-Identifier: Apache-2.0
"""Processes: the process group, megatron-core's parallel groups, seeds, what ranks tell each other.

Called first by the training loop. Knows gloo and NCCL; knows nothing about models.
"""

from __future__ import annotations

import argparse
import logging
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.offload.integration import gloo

_TIMEOUT = timedelta(minutes=10)


def initialize_logging(args: argparse.Namespace) -> None:
    """Rank 0 speaks, the others only warn; megatron-core's own chatter stays away."""
    level = logging.INFO if args.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    for name in ("megatron.core", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def initialize_distributed(args: argparse.Namespace) -> torch.device:
    """Starts the process group and megatron-core's parallel groups, and seeds every generator.

    Without a launcher (`torchrun`) the one process needs no address and no port.

    Returns:
        The device to train on.
    """
    torch.set_num_threads(args.cpu_threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if args.world_size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )
    else:
        dist.init_process_group(
            backend, rank=args.rank, world_size=args.world_size, timeout=_TIMEOUT
        )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    # Stages draw different weights and dropout masks; the ranks of a stage and its replicas agree.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return device


def share_losses(
    loss_sums: torch.Tensor | None, num_losses: int, num_terms: int, device: torch.device
) -> list[float]:
    """Averages losses over the data-parallel ranks of the last stage and tells every rank.

    Args:
        loss_sums: [num_losses] fp32 sums over this rank's micro-batches; None except on the last
            stage.
        num_losses: How many there are.
        num_terms: How many micro-batches each sums.
        device: Where collectives take place.
    """
    losses = torch.zeros(num_losses, dtype=torch.float32, device=device)
    if loss_sums is not None:
        losses += loss_sums.float() / num_terms
        dist.all_reduce(losses, group=parallel_state.get_data_parallel_group())
        losses /= parallel_state.get_data_parallel_world_size()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            losses,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return [float(loss) for loss in losses.tolist()]


def largest(value: int, device: torch.device) -> int:
    """The largest of all ranks' values, on every rank."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def of_all(value: str | None) -> list[str | None]:
    """The values of all ranks, by rank."""
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shutdown() -> None:
    """Ends the parallel groups and the process group together on all ranks."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gloo.wait_until_idle()
