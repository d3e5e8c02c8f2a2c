# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload plan`: `add_arguments`. What they ask for: `request.py`.

Sizes and parallelism are named as Megatron's flags, so that a whole training command can be pasted
after `--`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.flag_values import count, number, size
from megatron.offload.commands.launch_command import LaunchCommand, not_looked_at
from megatron.offload.errors import ConfigurationError
from megatron.offload.flag import argparse_type
from megatron.offload.planner.projection.hardware import DEFAULT_DRIVE, names
from megatron.offload.planner.projection.projection import MIB
from megatron.offload.states.config import DEFAULT_WINDOW_BYTES
from megatron.offload.values import parse_count, parse_slowdown

_MOST_LAYERS = 10_000  # with more, planning takes minutes


def _every(text: object) -> int:
    if not str(text).isdecimal():
        raise ConfigurationError(
            f"plan takes a number, every so many layers, and no pattern such as {text}; measure "
            "this model, or leave the flag out to plan for experts in every layer"
        )
    return parse_count(text)


_layers = argparse_type(lambda text: parse_count(text, _MOST_LAYERS))

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

The flags of model, division and batch may come from the command that starts the training, torchrun
and all, after --; of its other flags those that are not looked at are named, and nothing is run:

  megatron-offload plan --hardware h100 -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

Projected seconds come from data sheets and stated assumptions and are worth no more than these;
bytes are exact. Where a run is possible, measure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload plan`."""
    source = parser.add_argument_group("what to plan for").add_mutually_exclusive_group(
        required=True
    )
    source.add_argument(
        "--profile", type=Path, metavar="FILE", help="a profile that a run has measured"
    )
    source.add_argument("--hardware", choices=names("gpus"), help="a GPU, known by its data sheet")
    add_hardware(parser.add_argument_group("hardware"))
    add_model(parser.add_argument_group("model, as Megatron's flags"))
    add_parallelism(parser.add_argument_group("division and batch, as Megatron's flags"))
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


_OTHER_LAYERS = "its layers are of other kinds"
_UNEVEN = "stages then have different numbers of layers"
_NARROW = "what is kept in 8 bits or 4 depends on Transformer Engine"
# Flags of Megatron that make another model of it, or divide it otherwise, than plan describes.
_OTHER_MODELS = {
    "--moe-expert-capacity-factor": "it drops tokens",
    "--moe-latent-size": "it adds matrices before the experts",
    "--multi-latent-attention": "it keeps other tensors than plan's attention",
    "--mtp-num-layers": "it adds layers behind the last one",
    "--hybrid-override-pattern": _OTHER_LAYERS,
    "--hybrid-layer-pattern": _OTHER_LAYERS,
    "--is-hybrid-model": _OTHER_LAYERS,
    "--heterogeneous-layers-config-path": _OTHER_LAYERS,
    "--heterogeneous-layers-config-encoded-json": _OTHER_LAYERS,
    "--fp8-format": _NARROW,
    "--fp4-format": _NARROW,
    "--decoder-first-pipeline-num-layers": _UNEVEN,
    "--decoder-last-pipeline-num-layers": _UNEVEN,
    "--pipeline-model-parallel-layout": _UNEVEN,
    "--account-for-embedding-in-pipeline-split": _UNEVEN,
    "--account-for-loss-in-pipeline-split": _UNEVEN,
}
# The same of divisions, which mean nothing where they are 1.
_OTHER_DIVISIONS = {
    "--context-parallel-size": "plan divides no sequence among ranks",
}


def read_launch_command(args: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Sets what a command that starts a training says of model, division and placements.

    What was given before it counts unless the command says otherwise.

    Args:
        words: of the command; none: there is no command.

    Returns:
        Sentences about what of it is not looked at, and what is assumed.

    Raises:
        ConfigurationError: plan cannot describe this training.
    """
    if not words:
        return []
    command = LaunchCommand.of(words)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_model(parser)
    add_parallelism(parser)
    _add_goal(parser)
    streams = any(one.partition("=")[0] == "--parameter-offload" for one in command.flags)
    if streams:
        _add_streaming(parser)
    for flag in _OTHER_DIVISIONS:
        parser.add_argument(flag, type=count, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=count)
    others = command.read(parser, args)
    found = {name: _OTHER_MODELS[name] for name in others if name in _OTHER_MODELS}
    for flag, why in _OTHER_DIVISIONS.items():
        if getattr(args, flag[2:].replace("-", "_")) > 1:
            found[flag] = why
    of_experts = args.expert_tensor_parallel_size
    if args.num_experts is not None and of_experts not in (None, args.tensor_model_parallel_size):
        found["--expert-tensor-parallel-size"] = "plan divides experts as all other matrices"
    if found:
        reasons = ", ".join(f"{flag} ({why})" for flag, why in found.items())
        raise ConfigurationError(
            f"plan cannot take into account {reasons}; its figures would be those of another "
            "training: measure this one with --activation-offload auto or megatron-offload rok, or "
            "leave these flags out to plan for the training without them"
        )
    if args.num_gpus is None:
        args.num_gpus = command.num_processes
    if args.recompute_granularity == "full":  # the plan says what is recomputed
        others.append("--recompute-granularity full")
    said = [not_looked_at(others)] if others else []
    if not any(one.partition("=")[0] == "--vocab-size" for one in command.flags):
        said.append(f"the launch command has no --vocab-size; {args.vocab_size} is taken")
    return said


def add_hardware(group: Any) -> None:
    """Adds the flags of drives, host memory and what a GPU reaches."""
    group.add_argument(
        "--ssds",
        type=number(0, 1024),
        default=1,
        metavar="N",
        help="drives for each GPU, 0.5 where two share one; 0: none. Default: 1",
    )
    group.add_argument(
        "--ssd", choices=names("drives"), help=f"model of the drives. Default: {DEFAULT_DRIVE}"
    )
    group.add_argument(
        "--activation-offload-host-budget",
        type=size,
        default=0,
        metavar="SIZE",
        help="host memory for each GPU's activations. Default: none",
    )
    group.add_argument(
        "--activation-offload-drive-tbw",
        type=size,
        metavar="SIZE",
        help="bytes that a drive is rated to endure (TBW), for other drives than those known here",
    )
    group.add_argument(
        "--matmul-fraction",
        type=number(0.001, 1),
        metavar="FRACTION",
        help="part of the GPU's peak that matrix products reach. Default: the GPU's, see gpus.json",
    )


def add_model(group: Any) -> None:
    """Adds the flags of a model's sizes."""
    group.add_argument("--num-layers", type=_layers, metavar="N")
    for flag in ("--hidden-size", "--num-attention-heads", "--seq-length"):
        group.add_argument(flag, type=count, metavar="N")
    for flag in ("--ffn-hidden-size", "--kv-channels", "--num-query-groups"):
        group.add_argument(flag, type=count, metavar="N")
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-experts", type=count, metavar="N")
    group.add_argument(
        "--moe-router-topk",
        type=count,
        default=2,
        metavar="N",
        help="experts of a token. Default: 2",
    )
    group.add_argument(
        "--moe-ffn-hidden-size", type=count, metavar="N", help="default: --ffn-hidden-size"
    )
    group.add_argument("--moe-shared-expert-intermediate-size", type=count, default=0, metavar="N")
    group.add_argument(
        "--moe-layer-freq",
        type=argparse_type(_every),
        default=1,
        metavar="N",
        help="the first layer has experts, and each after N layers. Default: 1, all have",
    )
    group.add_argument("--vocab-size", type=count, default=51200, metavar="N")
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
    )
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    for flag in ("--hidden-dropout", "--attention-dropout"):
        group.add_argument(
            flag, type=number(0, 0.999), default=0.1, metavar="P", help="default: 0.1"
        )
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument(
        "--kernels",
        choices=("fused", "eager"),
        default="fused",
        help="eager: an operation for each line of Python, as in the models of transformers; norms "
        "and gated units then save more. No flag of Megatron. Default: fused",
    )
    group.add_argument(
        "--attention-backend",
        choices=("auto", "flash", "fused", "unfused", "local"),
        default="auto",
        help="unfused and local save attention scores",
    )
    group.add_argument(
        "--recompute-granularity",
        choices=("selective", "full"),
        help="selective: attention scores are made again in backward, where they would be saved. "
        "full: means nothing here, as the plan says what is recomputed",
    )


def add_parallelism(group: Any) -> None:
    """Adds the flags of batch sizes and of how a model is divided."""
    for flag in ("--micro-batch-size", "--global-batch-size"):
        group.add_argument(flag, type=count, metavar="N")
    group.add_argument("--tensor-model-parallel-size", type=count, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=_layers, default=1, metavar="N")
    virtual = group.add_mutually_exclusive_group()
    virtual.add_argument("--num-layers-per-virtual-pipeline-stage", type=count, metavar="N")
    virtual.add_argument("--num-virtual-stages-per-pipeline-rank", type=count, metavar="N")
    group.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage", type=count, metavar="N"
    )
    group.add_argument("--expert-model-parallel-size", type=count, default=1, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument(
        "--num-gpus",
        type=count,
        metavar="N",
        help="GPUs in all. Default: one copy of the model, without data parallelism",
    )
    group.add_argument(
        "--pipeline-stage",
        type=int,
        default=0,
        metavar="N",
        help="stage to show. Default: 0, which holds the most activations",
    )


def _add_goal(group: Any) -> None:
    group.add_argument(
        "--activation-memory-budget",
        type=size,
        metavar="SIZE",
        help="the least time with at most this much device memory for activations",
    )
    group.add_argument(
        "--activation-offload-max-slowdown",
        type=argparse_type(parse_slowdown),
        metavar="FRACTION",
        help="the least memory in a step that is at most this much slower than one that keeps "
        "everything. Default, without a budget: 0.02",
    )
    add_what_moves(group)


def add_what_moves(group: Any) -> None:
    """Adds the flags of what is moved, replayed and encoded, and of where states are."""
    group.add_argument(
        "--activation-offload-min-bytes",
        type=size,
        default=MIB,
        metavar="SIZE",
        help="smaller storages stay. Default: 1MiB",
    )
    group.add_argument(
        "--activation-offload-inflight",
        type=size,
        metavar="SIZE",
        help="most bytes on their way at a time. Default: 512MiB, or the largest layer",
    )
    group.add_argument(
        "--activation-replay",
        choices=("off", "on"),
        help="on: plans may have what norms and activation functions give computed again in "
        "backward, neither kept nor moved. Default: on with --kernels eager; off with fused ones, "
        "of which replay knows Megatron's own and not Transformer Engine's",
    )
    group.add_argument(
        "--activation-codec",
        choices=("off", "int8", "int4"),
        default="off",
        help="plans may have what layers save kept and moved in few bits; gradients are then "
        "approximate. Default: off",
    )
    group.add_argument(
        "--optimizer-state-offload",
        choices=("off", "host", "ssd"),
        default="off",
        help="where optimizer states and main weights are. Default: off, in device memory",
    )
    group.add_argument(
        "--optimizer-state-window",
        type=size,
        default=DEFAULT_WINDOW_BYTES,
        metavar="SIZE",
        help="with ssd: bytes of states that stay in host memory. Default: 256MiB",
    )


def _add_streaming(group: Any) -> None:
    group.add_argument("--parameter-offload", choices=("off", "host", "ssd"), default="off")
    group.add_argument(
        "--parameter-offload-live-units", type=count, default=2, metavar="N", help="default: 2"
    )
    group.add_argument(
        "--gradient-offload",
        choices=("off", "on"),
        default="off",
        help="on: gradients of layers wait with the parameters, in layer-major steps. Default: off",
    )
    group.add_argument(
        "--layer-major-units",
        type=lambda text: None if text == "auto" else _layers(text),
        metavar="{auto,N}",
        help="default: auto, each layer",
    )
    group.add_argument(
        "--activation-recompute-layers",
        choices=("all", "off"),
        default="all",
        help="all: layers keep only their inputs and run again in backward. Default: all",
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
