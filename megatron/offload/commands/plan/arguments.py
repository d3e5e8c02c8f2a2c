# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload plan`: `add_arguments`, `request_of`.

Sizes and parallelism are named as Megatron's flags, so that those of a training command can be
pasted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.profile.stage_profile import StageProfile
from megatron.offload.planner.projection.hardware import (
    DEFAULT_DRIVE,
    DriveSpec,
    GpuSpec,
    Hardware,
    names,
)
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import MIB, Projection, project, states_of
from megatron.offload.planner.projection.states import ProjectedStates
from megatron.offload.sizes import parse_size
from megatron.offload.states.config import DEFAULT_WINDOW_BYTES

DESCRIPTION = """\
Decides, without running anything, which activations stay in device memory, are recomputed, or go
to host memory or SSDs, and predicts step time, waits and memory. From a profile that a run has
measured (--profile), or from a description of model and hardware:

  megatron-offload plan --hardware h100 --num-gpus 8 --ssds 2 --bf16 \\
      --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \\
      --swiglu --position-embedding-type rope --normalization RMSNorm --vocab-size 32000 \\
      --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights \\
      --seq-length 4096 --micro-batch-size 2 --global-batch-size 1024 \\
      --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
      --activation-memory-budget 12GiB --rok rok.png --output plan.json

Projected seconds come from data sheets and stated assumptions and are worth no more than these;
bytes are exact. Where a run is possible, measure."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload plan`."""
    source = parser.add_argument_group("what to plan for").add_mutually_exclusive_group(
        required=True
    )
    source.add_argument(
        "--profile", type=Path, metavar="FILE", help="a profile that a run has measured"
    )
    source.add_argument("--hardware", choices=names("gpus"), help="a GPU, known by its data sheet")
    _add_hardware(parser.add_argument_group("hardware"))
    _add_model(parser.add_argument_group("model, as Megatron's flags"))
    _add_parallelism(parser.add_argument_group("division and batch, as Megatron's flags"))
    _add_goal(parser.add_argument_group("goal"))
    _add_streaming(
        parser.add_argument_group(
            "steps whose parameters stream",
            "with --parameter-offload no plan is made: steps that run one micro-batch after the "
            "other and layer-major ones are compared, as the trainer's flags of these names "
            "would have them",
        )
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write the plan, for --activation-offload-plan"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    output.add_argument(
        "--rok",
        type=Path,
        metavar="FILE",
        help="draw speed against memory for a range of budgets (.png or .svg; needs matplotlib)",
    )


def _add_hardware(group: Any) -> None:
    group.add_argument(
        "--ssds",
        type=float,
        default=1,
        metavar="N",
        help="drives for each GPU, 0.5 where two share one; 0: none. Default: 1",
    )
    group.add_argument(
        "--ssd", choices=names("drives"), help=f"their model. Default: {DEFAULT_DRIVE}"
    )
    group.add_argument(
        "--activation-offload-host-budget",
        type=_checked(parse_size),
        default=0,
        metavar="SIZE",
        help="host memory for each GPU's activations. Default: none",
    )
    group.add_argument(
        "--activation-offload-drive-tbw",
        type=_checked(parse_size),
        metavar="SIZE",
        help="what a drive is rated to be written, for other drives than those known here",
    )
    group.add_argument(
        "--matmul-fraction",
        type=float,
        metavar="FRACTION",
        help="part of the GPU's peak that matrix products reach. Default: the GPU's, see gpus.json",
    )


def _add_model(group: Any) -> None:
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        group.add_argument(flag, type=_count, metavar="N")
    for flag in ("--ffn-hidden-size", "--kv-channels", "--num-query-groups"):
        group.add_argument(flag, type=_count, metavar="N")
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--vocab-size", type=_count, default=51200, metavar="N")
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
    )
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    for flag in ("--hidden-dropout", "--attention-dropout"):
        group.add_argument(flag, type=float, default=0.1, metavar="P", help="default: 0.1")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument(
        "--attention-backend",
        choices=("auto", "flash", "fused", "unfused", "local"),
        default="auto",
        help="unfused and local save attention scores",
    )
    group.add_argument(
        "--recompute-granularity",
        choices=("selective",),
        help="attention scores are made again in backward, where they would be saved",
    )


def _add_parallelism(group: Any) -> None:
    for flag in ("--micro-batch-size", "--global-batch-size"):
        group.add_argument(flag, type=_count, metavar="N")
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        group.add_argument(flag, type=_count, default=1, metavar="N")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=_count, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument(
        "--num-gpus",
        type=_count,
        metavar="N",
        help="altogether. Default: one copy of the model, without data parallelism",
    )
    group.add_argument(
        "--pipeline-stage",
        type=int,
        default=0,
        metavar="N",
        help="which one to show. Default: 0, which holds the most activations",
    )


def _add_goal(group: Any) -> None:
    group.add_argument(
        "--activation-memory-budget",
        type=_checked(parse_size),
        metavar="SIZE",
        help="the least time with at most this much device memory for activations",
    )
    group.add_argument(
        "--activation-offload-max-slowdown",
        type=float,
        metavar="FRACTION",
        help="the least memory in a step that is at most this much slower than one that keeps "
        "everything. Default, without a budget: 0.02",
    )
    group.add_argument(
        "--activation-offload-min-bytes",
        type=_checked(parse_size),
        default=MIB,
        metavar="SIZE",
        help="smaller storages stay. Default: 1MiB",
    )
    group.add_argument(
        "--activation-offload-inflight",
        type=_checked(parse_size),
        metavar="SIZE",
        help="most bytes on their way at a time. Default: 512MiB, or the largest layer",
    )
    group.add_argument(
        "--optimizer-state-offload",
        choices=("off", "host", "ssd"),
        default="off",
        help="where optimizer states and main weights are. Default: off, in device memory",
    )
    group.add_argument(
        "--optimizer-state-window",
        type=_checked(parse_size),
        default=DEFAULT_WINDOW_BYTES,
        metavar="SIZE",
        help="of them, what stays in host memory with ssd. Default: 256MiB",
    )


def _add_streaming(group: Any) -> None:
    group.add_argument("--parameter-offload", choices=("off", "host", "ssd"), default="off")
    group.add_argument(
        "--parameter-offload-live-units", type=_count, default=2, metavar="N", help="default: 2"
    )
    group.add_argument(
        "--gradient-offload",
        choices=("off", "on"),
        default="off",
        help="on: gradients of layers wait there too, in layer-major steps. Default: off",
    )
    group.add_argument(
        "--layer-major-units",
        type=lambda text: None if text == "auto" else _count(text),
        metavar="{auto,N}",
        help="default: auto, each layer",
    )
    group.add_argument(
        "--activation-recompute-layers",
        choices=("all", "off"),
        default="all",
        help="default: all; they keep their inputs alone",
    )
    group.add_argument(
        "--activation-offload",
        choices=("off", "host", "ssd"),
        default="off",
        help="where these inputs wait, or all that layers keep. Default: off, in device memory",
    )
    group.add_argument(
        "--activation-boundary",
        choices=("keep", "host", "ssd"),
        default="keep",
        help="where hidden states and their gradients wait between units. Default: keep, in device "
        "memory",
    )
    group.add_argument(
        "--data-parallel-sharding-strategy",
        choices=("no_shard", "optim_grads_params"),
        default="no_shard",
        help="optim_grads_params: as ZeRO-3 and FSDP. Default: no_shard",
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw tokens a second over tokens a step (.png or .svg; needs matplotlib)",
    )


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
    if slowdown is not None and slowdown < 0:
        raise ConfigurationError(
            f"--activation-offload-max-slowdown {slowdown} is below zero; write the part of a "
            "step's time, for example 0.02"
        )
    if args.ssds < 0:
        raise ConfigurationError(f"--ssds {args.ssds} is below zero; give a number of drives")
    rated = args.activation_offload_drive_tbw
    if args.profile is not None:
        given = [flag_of(name) for name in _NEEDED if getattr(args, name) is not None]
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
    model, parallel = _model(args), _parallelism(args)
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
            states_on=args.optimizer_state_offload,
            states_window_bytes=args.optimizer_state_window,
        )
        for stage in range(parallel.pipeline)
    )


def _model(args: argparse.Namespace) -> Transformer:
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
    virtual = 1
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
    )


def flag_of(name: str) -> str:
    """The flag of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed; the smallest value is 1")
    return number


def _checked(parse: Callable[[str], int]) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            return parse(text)
        except ConfigurationError as error:
            words = str(error).removeprefix("activation offload: ")
            raise argparse.ArgumentTypeError(words) from None

    convert.__name__ = "size"  # argparse's own message names it
    return convert
