# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload longest`: `add_arguments`, `check_arguments`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.activations.placement.atomic_file import check_place
from megatron.offload.commands.drawing import check_picture
from megatron.offload.commands.flag_values import count, known_names, size
from megatron.offload.commands.longest.text import UNITS
from megatron.offload.commands.longest.ways import DEFAULT_WAYS, WAYS
from megatron.offload.commands.plan.arguments import (
    add_hardware,
    add_model,
    add_parallelism,
    add_what_moves,
)
from megatron.offload.commands.plan.request import flag_of
from megatron.offload.commands.training_runs.script import add_script_arguments, check_script
from megatron.offload.errors import ConfigurationError
from megatron.offload.planner.projection.hardware import GpuSpec, names

PLACEHOLDER = "{N}"
_FIRST = {"sequence": 512, "batch": 1, "layers": 2}
_MULTIPLE = {"sequence": 64, "batch": 1, "layers": 1}
_MOST, _MOST_LAYERS = 1 << 22, 10_000
_STEPS = 3  # of a run

DESCRIPTION = """\
How long a sequence (how large a batch, how many layers) fits into a memory, with each of our steps
against memory: longest trains a script for a few steps with short sequences, then longer ones,
predicts where each way meets the budget, and with --check runs that length and the next one.

  megatron-offload longest --device-memory-budget 3GiB --check \\
      --script train.py --script-args "--tokens {N} --layers 8"

  megatron-offload longest --hardware h100 --optimizer-state-offload host --bf16 --kernels eager \\
      --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
      --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
      --position-embedding-type rope --vocab-size 128256 --untie-embeddings-and-output-weights \\
      --hidden-dropout 0 --attention-dropout 0 --ssds 4

The script calls offload_activations and reads the length from its arguments, where {N} is. It runs
as it is; the settings that decide what becomes of activations are replaced. The budget is all
device memory of a process: weights, states and activations; on a CPU its resident set, where the
allocator gives back at once what is freed (MIMALLOC_PURGE_DELAY=0): train so near the limit.

Ways, with --ways:
  none                everything stays in memory
  checkpointing       layers run again in backward
  checkpointing-host  the same, their inputs on the host
  ssd                 everything goes to the SSD, or is replayed where replay is on
  inputs              layers run again in backward, their inputs on the SSD
  chunked             the same, and the loss over chunks of tokens (not bit-identical)
  tiled               the same, and MLPs over tiles of tokens (not bit-identical)
  script              as the script says itself

Exit code: 0 done; 1 with --check: a prediction was further than 5 % from what ran, or a run failed;
2 nothing fits, or it could not be measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload longest`."""
    source = parser.add_argument_group("what trains")
    add_script_arguments(source)
    source.add_argument(
        "--hardware",
        choices=names("gpus"),
        help="in place of a script: predict for a GPU, known by its data sheet",
    )
    parser.add_argument(
        "--device-memory-budget",
        type=size,
        metavar="SIZE",
        help="device memory of a process, whatever it holds. Default with --hardware: the GPU's",
    )
    parser.add_argument(
        "--by", choices=tuple(UNITS), default="sequence", help="what {N} is; default: sequence"
    )
    parser.add_argument(
        "--ways",
        type=known_names("way", WAYS),
        metavar="WAY,...",
        help=f"default: {','.join(DEFAULT_WAYS)}",
    )
    parser.add_argument(
        "--first",
        type=count,
        metavar="N",
        help="the shortest that is measured; default: 512 tokens, 1 sample, 2 layers",
    )
    parser.add_argument(
        "--most", type=count, default=_MOST, metavar="N", help="no longer one; default: %(default)s"
    )
    parser.add_argument(
        "--multiple-of",
        type=count,
        metavar="N",
        help="lengths are multiples of it; default: 64 tokens, 1 sample, 1 layer",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the longest that should fit, and one that is longer by --multiple-of or 2 %%",
    )
    parser.add_argument(
        "--steps", type=count, default=_STEPS, metavar="N", help="of each run; default: 3"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory by length (.png or .svg; needs matplotlib)",
    )
    add_hardware(parser.add_argument_group("hardware, with --hardware"))
    add_model(parser.add_argument_group("model, with --hardware, as Megatron's flags"))
    add_parallelism(parser.add_argument_group("division and batch, with --hardware"))
    add_what_moves(parser.add_argument_group("what moves, with --hardware"))


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the flags together, and sets what depends on others.

    Raises:
        ConfigurationError: they contradict each other, or name what is not there.
    """
    if (args.script is None) == (args.hardware is None):
        raise ConfigurationError(
            "longest trains a script of yours with offload_activations in it, or predicts for a "
            "GPU; give one of --script and --hardware"
        )
    if args.script is not None:
        _check_script(args)
    else:
        _check_hardware(args)
    if args.device_memory_budget < 1:
        raise ConfigurationError("nothing fits in a --device-memory-budget of 0; give more")
    args.ways = args.ways or list(DEFAULT_WAYS)
    multiple = args.multiple_of = args.multiple_of or _MULTIPLE[args.by]
    args.first = -(-(args.first or _FIRST[args.by]) // multiple) * multiple
    args.most -= args.most % multiple
    if args.most <= args.first:
        raise ConfigurationError(
            f"--most {args.most} is no more than the shortest run of {args.first}, both as "
            f"multiples of {multiple}; give a smaller --first or a larger --most"
        )
    if args.plot is not None:
        check_picture("--plot", args.plot)
    for path in (args.json, args.plot):
        if path is not None:
            check_place(path)


def _check_script(args: argparse.Namespace) -> None:
    check_script(args.script)
    if args.device_memory_budget is None:
        raise ConfigurationError(
            "a script is measured within a budget; give --device-memory-budget"
        )
    if PLACEHOLDER not in args.script_args:
        raise ConfigurationError(
            f"--script-args has no {PLACEHOLDER}, which stands for the {UNITS[args.by]}; write for "
            f'example --script-args "--tokens {PLACEHOLDER}"'
        )
    try:
        shlex.split(args.script_args)
    except ValueError as error:
        raise ConfigurationError(f"--script-args {args.script_args}: {error}") from None
    if args.steps < 2:
        raise ConfigurationError("--steps 1 ends before optimizer states are there; give 2 or more")
    for_hardware = (add_hardware, add_model, add_parallelism, add_what_moves)
    _refuse(_given(args, *for_hardware), "for --hardware, and a script has its own; drop them")


def _check_hardware(args: argparse.Namespace) -> None:
    """Also sets what a prediction does not need to be told."""
    if args.check or "script" in (args.ways or ()):
        what = "--check" if args.check else "the way script"
        raise ConfigurationError(f"{what} trains, and with --hardware nothing runs; drop one")
    of_runs = {"--first": args.first, "--script-args": args.script_args}
    of_runs |= {"--steps": args.steps != _STEPS, "--pipeline-stage": args.pipeline_stage}
    _refuse([flag for flag, given in of_runs.items() if given], "of no use with --hardware; drop")
    looked_for: dict[str, tuple[str, ...]]
    looked_for = {"sequence": ("seq_length",), "layers": ("num_layers",)}
    looked_for["batch"] = ("micro_batch_size", "global_batch_size")
    given = [flag_of(name) for name in looked_for[args.by] if getattr(args, name) is not None]
    _refuse(given, f"what --by {args.by} looks for; drop")
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [
        flag_of(one)
        for one in needed
        if getattr(args, one) is None and one not in looked_for[args.by]
    ]
    if missing:
        raise ConfigurationError(f"--hardware needs a model as well; give {', '.join(missing)}")
    args.micro_batch_size = args.micro_batch_size or 1
    if args.by == "layers":
        of_chunk = args.num_layers_per_virtual_pipeline_stage or 1
        args.multiple_of = args.multiple_of or args.pipeline_model_parallel_size * of_chunk
        args.most = min(args.most, _MOST_LAYERS)
    if args.device_memory_budget is None:
        args.device_memory_budget = int(GpuSpec.load(args.hardware).memory_bytes)
    if args.activation_offload_host_budget and args.ways is None:
        args.ways = [*DEFAULT_WAYS, "checkpointing-host"]


def _given(args: argparse.Namespace, *groups: Callable[[Any], None]) -> list[str]:
    """The flags of these groups that have been given."""
    parser = argparse.ArgumentParser()
    for add in groups:
        add(parser)
    defaults = vars(parser.parse_args([]))
    return [flag_of(name) for name, value in defaults.items() if getattr(args, name) != value]


def _refuse(flags: Sequence[str], why: str) -> None:
    if flags:
        raise ConfigurationError(f"{', '.join(flags)}: {why}")
