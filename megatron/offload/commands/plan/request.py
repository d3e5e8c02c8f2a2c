# SPDX-License-Identifier: Apache-2.0
"""What the flags of `megatron-offload plan` ask for: `Request`, `request_of`.

It reads parsed flags and says which of them cannot be together; `arguments.py` has the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.hardware import (
    DEFAULT_DRIVE,
    DriveSpec,
    GpuSpec,
    Hardware,
)
from megatron.offload.planner.projection.model import Experts, Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project, states_of
from megatron.offload.planner.projection.states import ProjectedStates

_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
)
# Flags that mean something with --parameter-offload alone, and their defaults.
_STREAMING = {
    "parameter_offload_live_units": 2,
    "gradient_offload": "off",
    "layer_major_units": None,
    "activation_recompute_layers": "all",
    "activation_offload": "off",
    "activation_boundary": "keep",
    "data_parallel_sharding_strategy": "no_shard",
    "plot": None,
}


@dataclass(frozen=True)
class Request:
    """What the command's flags ask for.

    Attributes:
        profile: of the stage in question.
        projections: of all stages, where the profile is projected; else empty.
        states: of the optimizer of the stage in question, where they are projected to be away.
        rated_bytes: that the drives of one GPU may be written in their life; None: not known.
    """

    profile: StageProfile
    projections: tuple[Projection, ...]
    budget_bytes: int | None
    max_slowdown: float | None
    rated_bytes: float | None
    states: ProjectedStates | None = None

    @property
    def projection(self) -> Projection | None:
        """Projection of the stage that is planned, if it was projected."""
        return self.projections[self.profile.position.stage] if self.projections else None


def request_of(args: argparse.Namespace) -> Request:
    """What the flags ask for. Raises ConfigurationError, OSError."""
    ignored = [flag_of(name) for name, value in _STREAMING.items() if getattr(args, name) != value]
    if ignored:
        raise ConfigurationError(
            f"{', '.join(ignored)}: for steps whose parameters stream; give --parameter-offload too"
        )
    budget, slowdown = args.activation_memory_budget, args.activation_offload_max_slowdown
    if budget is None and slowdown is None:
        slowdown = 0.02
    rated = args.activation_offload_drive_tbw
    if args.profile is not None:
        given = [flag_of(name) for name in _NEEDED if getattr(args, name) is not None]
        if args.activation_replay is not None:
            given.append(f"--activation-replay {args.activation_replay}")
        if args.activation_codec != "off":
            given.append(f"--activation-codec {args.activation_codec}")
        if given:
            raise ConfigurationError(
                f"--profile has the model and its sizes; drop {', '.join(given)}, or give "
                "--hardware instead to plan for another model"
            )
        if rated is None and args.ssd is not None:
            rated = DriveSpec.load(args.ssd).rated_bytes
        drives_bytes = None if rated is None else rated * args.ssds
        return Request(StageProfile.load(args.profile), (), budget, slowdown, drives_bytes)
    projections = projections_of(args)
    if not 0 <= args.pipeline_stage < len(projections):
        raise ConfigurationError(
            f"there is no pipeline stage {args.pipeline_stage}; "
            f"choose 0 to {len(projections) - 1} with --pipeline-stage"
        )
    hardware = projections[0].hardware
    drives_bytes = hardware.rated_bytes if rated is None else rated * args.ssds
    of = projections[args.pipeline_stage]
    states = states_of(of, project(dataclasses.replace(of, states_on="off")))
    return Request(project(of), projections, budget, slowdown, drives_bytes, states)


def projections_of(args: argparse.Namespace) -> tuple[Projection, ...]:
    """Projections of all pipeline stages. Raises ConfigurationError."""
    missing = [flag_of(name) for name in _NEEDED if getattr(args, name) is None]
    if missing:
        raise ConfigurationError(
            f"--hardware needs a model as well; give {', '.join(missing)}, or --profile FILE"
        )
    model, parallel = model_of(args), _parallelism(args)
    replay = args.activation_replay or ("on" if model.eager else "off")
    gpu = GpuSpec.load(args.hardware)
    if args.matmul_fraction is not None:
        gpu = gpu.reaching(args.matmul_fraction)
    drive = DriveSpec.load(args.ssd or DEFAULT_DRIVE)
    hardware = Hardware(gpu, drive, args.ssds, args.activation_offload_host_budget)
    return tuple(
        Projection(
            model,
            parallel,
            hardware,
            stage=stage,
            distributed_optimizer=args.use_distributed_optimizer,
            min_bytes=args.activation_offload_min_bytes,
            inflight_bytes=args.activation_offload_inflight,
            replay=replay == "on",
            codec=args.activation_codec,
            states_on=args.optimizer_state_offload,
            states_window_bytes=args.optimizer_state_window,
        )
        for stage in range(parallel.pipeline)
    )


def _experts(args: argparse.Namespace) -> Experts | None:
    if args.num_experts is None:
        if args.expert_model_parallel_size > 1:
            raise ConfigurationError(
                "--expert-model-parallel-size means nothing without --num-experts; give both"
            )
        return None
    if args.num_experts % args.expert_model_parallel_size:
        raise ConfigurationError(
            f"--num-experts {args.num_experts} is no multiple of --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}; change one of them"
        )
    if getattr(args, "parameter_offload", "off") != "off":
        raise ConfigurationError(
            "plan does not know how experts stream; leave out --parameter-offload to plan where "
            "activations go, or --num-experts"
        )
    return Experts(
        args.num_experts,
        args.moe_router_topk,
        args.moe_ffn_hidden_size,
        args.moe_shared_expert_intermediate_size,
        args.moe_layer_freq,
    )


def model_of(args: argparse.Namespace) -> Transformer:
    """The model that the flags of `add_model` describe. Raises ConfigurationError."""
    if args.num_query_groups is not None and not args.group_query_attention:
        raise ConfigurationError(
            "--num-query-groups means nothing without --group-query-attention; give both"
        )
    return Transformer(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        vocab_size=args.vocab_size,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated=args.swiglu,
        rope=args.position_embedding_type == "rope",
        rms_norm=args.normalization == "RMSNorm",
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        flash_attention=args.attention_backend not in ("unfused", "local"),
        selective_recompute=args.recompute_granularity == "selective",
        eager=args.kernels == "eager",
        experts=_experts(args),
    )


def _parallelism(args: argparse.Namespace) -> Parallelism:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    copy = tensor * pipeline
    num_gpus = args.num_gpus or copy
    if num_gpus % copy:
        raise ConfigurationError(
            f"--num-gpus {num_gpus} is no multiple of the {copy} that one copy of the model takes; "
            "change it or the parallel sizes"
        )
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    of_chunk = args.num_layers_per_virtual_pipeline_stage
    if of_chunk is not None:
        virtual, rest = divmod(args.num_layers, of_chunk * pipeline)
        if rest:
            raise ConfigurationError(
                f"--num-layers {args.num_layers} is no multiple of {pipeline} pipeline stages "
                f"times --num-layers-per-virtual-pipeline-stage {of_chunk}; change one of them"
            )
    return Parallelism(
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=num_gpus // copy,
        sequence_parallel=args.sequence_parallel,
        expert=args.expert_model_parallel_size,
        group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
    )


def flag_of(name: str) -> str:
    """The flag of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"
