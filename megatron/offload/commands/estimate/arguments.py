# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload estimate`: `add_arguments`, `check_arguments`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.offload.activations.placement.atomic_file import check_place
from megatron.offload.commands.flag_values import count
from megatron.offload.errors import ConfigurationError
from megatron.offload.packages import check_packages
from megatron.offload.planner.projection.hardware import names

DESCRIPTION = """\
How much memory the training of a model of transformers takes, by kind and by tier, with and without
each stream of this package, and which line of Python makes it fit. It needs neither a GPU nor
weights: a step of the model runs on torch's meta device, where tensors have sizes and no bytes.

  megatron-offload estimate path/to/Llama-3.1-8B --hardware rtx-4090 --sequence 4096
  megatron-offload estimate config.json --lora 16 --batch 4 --hardware my-card.json
  megatron-offload estimate meta-llama/Llama-3.1-8B --gpus 8 --hardware h100

MODEL is a folder with a config.json, such a file, or a name on the hub, of which the configuration
alone is fetched. A file of hardware says as little as {"title": "my card", "memory_bytes": "24GB"}.

Exit code: 0 done; 1 no way fits the hardware; 2 the model or the hardware is not known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload estimate`."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json or a hub's name")
    parser.add_argument(
        "--batch", type=count, default=1, metavar="N", help="sequences of a micro-batch; default: 1"
    )
    parser.add_argument(
        "--sequence", type=count, default=2048, metavar="N", help="tokens of each; default: 2048"
    )
    parser.add_argument(
        "--micro-batches",
        type=count,
        default=1,
        metavar="N",
        help="of an optimizer step (gradient accumulation): from two on gradients are in memory "
        "all along; default: 1",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of weights, and so of gradients and optimizer states; default: bf16",
    )
    parser.add_argument(
        "--lora", type=count, metavar="RANK", help="train LoRA adapters of this rank alone"
    )
    parser.add_argument(
        "--lora-targets",
        metavar="MODULE,...",
        help="modules that get an adapter, or all-linear; default: what peft knows for the model",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "sgd"),
        default="adamw",
        help="adamw: torch's, fused on a GPU; sgd: without momentum; default: adamw",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE.json",
        help=f"what it is to fit into: {', '.join(names('gpus'))}, cpu (this machine), or a file",
    )
    parser.add_argument(
        "--gpus",
        type=count,
        default=1,
        metavar="N",
        help="that share parameters, gradients and states, as FSDP2 divides them; default: 1",
    )
    parser.add_argument(
        "--to", choices=("ssd", "host"), default="ssd", help="where things move; default: ssd"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the flags together, and what they need, before a model is made.

    Raises:
        ConfigurationError: they contradict each other, or a package is not installed.
    """
    if args.lora_targets is not None and args.lora is None:
        raise ConfigurationError("--lora-targets is of use with --lora; give a rank too")
    if args.gpus > 1 and args.hardware == "cpu":
        raise ConfigurationError("--gpus divides a training over GPUs; drop it, or --hardware cpu")
    if args.to == "host" and args.hardware == "cpu":
        raise ConfigurationError(
            "--to host frees nothing on a CPU, whose memory is the host's; drop it, or --hardware "
            "cpu"
        )
    packages = ["transformers"] + ["peft"] * (args.lora is not None)
    check_packages("megatron-offload estimate", *packages)
    if args.json is not None:
        check_place(args.json)
