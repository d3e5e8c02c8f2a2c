# SPDX-License-Identifier: Apache-2.0
"""Optimizer and learning-rate schedule, built from flags after the model chunks."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from megatron.offload.integration.megatron import ModelStates


def build_optimizer(
    args: argparse.Namespace, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Adam over all chunks, sharded over the data-parallel ranks if asked for."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        chunks,
    )
    get_model_config(chunks[0]).grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Counts samples. Flags win over what a checkpoint says, except for its position."""
    batch = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def materialize_adam_state(optimizer: MegatronOptimizer, states: ModelStates) -> None:
    """Gives torch's Adam the state that it would make in its first step.

    DistributedOptimizer loads a checkpoint into state that exists; torch's Adam, unlike the fused
    ones, has none before its first step. With offload of model states it goes where they are.
    """
    for part in _distributed_parts(optimizer):
        if not isinstance(part.optimizer, torch.optim.AdamW) or part.optimizer.state:
            continue
        if states.parts:
            states.make_states(_make_adam_state)
        else:
            _make_adam_state(part.optimizer)


def _make_adam_state(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def load_optimizer_state(optimizer: MegatronOptimizer, content: dict[str, Any]) -> None:
    """Loads what `sharded_state_dict` described and dist_checkpointing filled in.

    Megatron-core 0.16.1 loads a distributed optimizer for the fused Adams. With torch's it looks
    for a `step` among the tensors, which no checkpoint has, and makes all parameters share one
    counter, which then advances once per parameter. So the counters stay aside meanwhile.
    """
    parts = _distributed_parts(optimizer)
    if not parts:
        optimizer.load_state_dict(content)
        return
    (part,) = parts  # several only with expert parallelism, which has no checkpoints here
    content = dict(content)
    parameter_state = content.pop("param_state")
    content.pop("param_state_sharding_type")
    part.load_state_dict(content)
    counters = {
        parameter: state.pop("step").clone()
        for parameter, state in part.optimizer.state.items()
        if "step" in state
    }
    part.load_parameter_state_from_fully_reshardable(parameter_state)
    for parameter, counter in counters.items():
        part.optimizer.state[parameter]["step"] = counter


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The learning rate of the next step."""
    return float(optimizer.param_groups[0]["lr"])
