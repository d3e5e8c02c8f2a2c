# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in GPT: flags, their checks, settings, and the loss that balances them.

Called by `gpt.py` and, for the report, by the training loop. The layers themselves are core's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)

from .arguments import positive, real
from .errors import UserError

_TRACKED = "load_balancing_loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of experts."""
    group = parser.add_argument_group("experts")
    group.add_argument("--num-experts", type=positive, help="default: no mixture of experts")
    group.add_argument("--moe-router-topk", type=positive, default=2, help="experts of a token")
    group.add_argument("--moe-aux-loss-coeff", type=real, default=0.0)
    group.add_argument(
        "--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather"
    )
    group.add_argument("--moe-shared-expert-intermediate-size", type=positive)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the flags against the layout.

    Raises:
        UserError: They do not fit.
    """
    parts, num_experts = args.expert_model_parallel_size, args.num_experts
    of_experts = {"moe", "shared_experts"}.intersection(args.recompute_modules or ())
    if num_experts is None:
        if parts > 1:
            raise UserError("--expert-model-parallel-size needs --num-experts")
        if of_experts:
            raise UserError(f"--recompute-modules {min(of_experts)} needs --num-experts")
        return
    if num_experts % parts or args.data_parallel_size % parts:
        raise UserError(
            f"--num-experts ({num_experts}) and the data-parallel size "
            f"({args.data_parallel_size}) must be divisible by --expert-model-parallel-size "
            f"({parts}); change one of them"
        )
    if args.moe_router_topk > num_experts:
        raise UserError(
            f"--moe-router-topk ({args.moe_router_topk}) must not exceed --num-experts "
            f"({num_experts})"
        )
    if "shared_experts" in of_experts and args.moe_shared_expert_intermediate_size is None:
        raise UserError(
            "--recompute-modules shared_experts needs --moe-shared-expert-intermediate-size"
        )
    if not args.disable_bias_linear:
        raise UserError("--num-experts needs --disable-bias-linear")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UserError("--num-experts with tensor parallelism needs --sequence-parallel")
    if parts > 1 and (args.save is not None or args.load is not None):
        raise UserError(
            "--save and --load are not there for --expert-model-parallel-size above 1; "
            "leave them out"
        )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the TransformerConfig says about experts."""
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
    }


def take_balance_loss(args: argparse.Namespace) -> dict[str, float]:
    """The last step's auxiliary loss, the same on every rank; empty without one.

    A mean over layers, micro-batches and data-parallel ranks. Core adds up what each layer's
    router counts, so a router that counts twice shows here.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    if _TRACKED not in tracker:
        return {}
    entry = tracker[_TRACKED]
    values = entry["values"].clone()
    data_parallel = parallel_state.get_data_parallel_group()
    # Layers of other stages; the parts of this rank's tensor-parallel group; other samples.
    for group in (
        parallel_state.get_pipeline_model_parallel_group(),
        entry["reduce_group"],
        data_parallel,
    ):
        dist.all_reduce(values, group=group)
    clear_aux_losses_tracker()
    num_terms = args.num_layers * args.num_microbatches * data_parallel.size()
    return {"load_balancing": float(values.sum()) / num_terms}
