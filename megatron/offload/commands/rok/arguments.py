# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload rok`: `add_arguments`, `check_arguments`."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from megatron.offload.commands.flag_values import count, counts, known_names, size
from megatron.offload.commands.rok.strategy import DEFAULT_STRATEGIES, STRATEGIES
from megatron.offload.commands.rok.training_command import MeasuredCommand
from megatron.offload.commands.training_runs.script import add_script_arguments, check_script
from megatron.offload.commands.training_runs.trainer import OUTPUT, add_training_arguments
from megatron.offload.device.cuda import has_cuda
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.versions import SUPPORTED_VERSIONS
from megatron.offload.packages import check_packages
from megatron.offload.planner.libraries import LIBRARIES
from megatron.offload.sizes import parse_rate

DESCRIPTION = """\
Measures the recompute-offload-keep (ROK) curve of SSDTrain (arXiv 2408.10013) on this machine: peak
activation memory against speed, one point for each strategy and batch size. It trains a GPT with
the trainer of this checkout, or runs a training of yours, one for each point; on a CPU they
take turns, step by step, else there are several rounds in changing order. It writes rok.png,
rok.svg, rok.csv and rok.json.

  megatron-offload rok                                  # 8 layers, one batch size
  megatron-offload rok --micro-batch-sizes 2,4,8 --budgets 3
  megatron-offload rok --activation-offload-write-limit 150MB/s --check
  megatron-offload rok --script train.py                # any script with offload_activations
  megatron-offload rok -- torchrun --nproc-per-node 2 -m megatron.offload.launch \\
      Megatron-LM/pretrain_gpt.py --num-layers 8 ...    # your training command

off            keep everything
recompute      recompute every layer (Megatron's --recompute-granularity full)
recompute-ssd  the same, with the layers' inputs on SSDs
selective      recompute core attention (--recompute-granularity selective)
ssd            everything goes to SSDs; host, tiered: to host memory, to both
auto           the planner, at several memory budgets
suffix         the first layers go to SSDs, the others stay: as many as SSDTrain's rule says, and
               for each budget as few as should fit, by the profile that auto has measured

Times of auto are those after its last plan has settled. On a CPU, strategies without offload run
with the C library's allocator and with the one that offload uses; device memory is process memory.
The dashed line of the picture is what the planner predicts for any budget.

The second table says for each budget whether auto is as fast as every strategy that fits into the
same memory; with --check the exit code is 1 where it is not. Behind a fast drive there is little to
decide: --activation-offload-write-limit makes writes slower; reads are as fast as the drive is.

Exit code: 0 done, 1 with --check: auto lost or losses differ, 2 it could not be measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload rok`."""
    training = add_training_arguments(parser, num_layers=8, seq_length=256, vocab_size=1024)
    add_script_arguments(training)
    training.add_argument(
        "--micro-batch-sizes",
        type=counts,
        metavar="N,...",
        help="default: 4, or that of the training command. A step is one micro-batch; for more, "
        "--extra-args '--global-batch-size N'",
    )
    measure = parser.add_argument_group("runner")
    measure.add_argument(
        "--strategies",
        type=known_names("strategy", STRATEGIES),
        default=None,
        metavar="NAME,...",
        help=f"default: {','.join(DEFAULT_STRATEGIES)}; also: host, tiered",
    )
    measure.add_argument(
        "--budgets",
        type=_budgets,
        default=6,
        metavar="N|SIZE,...",
        help="memory budgets of auto: a number of them, evenly between the peaks of recomputing "
        "and of keeping everything, or sizes such as 120MiB,200MiB. Default: 6",
    )
    measure.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="trainings take turns, a step each, so that a temporary slowdown affects all of them "
        "equally; they must fit in memory at the same time. Default: where there is no GPU",
    )
    measure.add_argument(
        "--rounds", type=count, metavar="N", help="default: 1 with turns, 3 without"
    )
    measure.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="steps of each training that count; default: 15 with turns, 6 without",
    )
    measure.add_argument(
        "--skip-steps",
        type=count,
        default=2,
        metavar="N",
        help="steps that do not count: the first, or those after auto's last plan; default: 2",
    )
    measure.add_argument(
        "--noise",
        type=float,
        default=0.02,
        metavar="FRACTION",
        help="auto may take this much longer and still count as equally fast; default: 0.02",
    )
    measure.add_argument(
        "--check", action="store_true", help="exit code 1 where auto loses or losses differ"
    )
    measure.add_argument(
        "--activation-offload-dir",
        type=Path,
        metavar="DIR",
        help="directory on the SSD. Default: that of the training command, or runs/offload of the "
        "checkout",
    )
    measure.add_argument(
        "--activation-offload-write-limit",
        metavar="RATE",
        help="most bytes a second to the SSD, for example 150MB/s. Default: no limit",
    )
    measure.add_argument(
        "--activation-replay",
        choices=("off", "on"),
        default="on",
        help="on: strategies with activation offload replay, plans where they choose to; those "
        "without it do not. Default: on",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for all files; default: runs/rok-TIME"
    )
    output.add_argument(
        "--redraw",
        type=Path,
        metavar="FILE",
        help="measure nothing: read this rok.json, print its tables and draw again beside it",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigurationError where nothing could be measured; sets flags that depend on
    others."""
    if args.launch and (args.script is not None or args.redraw is not None):
        raise ConfigurationError(
            "rok measures one thing at a time; give either a training command after --, or "
            "--script, or --redraw"
        )
    trains_ours = args.script is None and args.redraw is None and not args.launch
    core = [f"megatron-core=={SUPPORTED_VERSIONS[-1]}"] if trains_ours else []
    check_packages("megatron-offload rok", *LIBRARIES, "matplotlib", "tqdm", *core)
    if args.redraw is not None:
        return
    args.training = None
    if args.script is not None:
        _check_script(args)
    elif args.launch:
        args.training = MeasuredCommand.of(args.launch)
        _take(args, args.training)
    args.micro_batch_sizes = args.micro_batch_sizes or [4]
    if args.activation_offload_dir is None:
        args.activation_offload_dir = OUTPUT / "runs" / "offload"
    args.strategies = args.strategies or list(DEFAULT_STRATEGIES)
    if trains_ours and not args.trainer.is_file():
        raise ConfigurationError(
            f"there is no trainer at {args.trainer}, which is no part of the installed package; "
            "run this from a checkout of megatron-offload or give --trainer"
        )
    chosen = args.strategies
    if "suffix" in chosen and "auto" not in chosen:
        raise ConfigurationError(
            "suffix follows the profile that auto measures; add auto to --strategies"
        )
    if "auto" in chosen and isinstance(args.budgets, int) and not {"off", "recompute"} <= {*chosen}:
        raise ConfigurationError(
            "a number of budgets lies between the peaks of off and recompute; add both to "
            "--strategies, or give --budgets as sizes"
        )
    processes = 1 if args.training is None else args.training.start.processes
    if args.turns and processes > 1:
        raise ConfigurationError(
            "--turns works with one process, which reads its turns from its standard input; drop it"
        )
    if args.turns is None:
        args.turns = processes == 1 and not has_cuda()
    args.rounds = args.rounds or (1 if args.turns else 3)
    args.steps = args.steps or (15 if args.turns else 6)
    if args.activation_offload_write_limit is not None:
        parse_rate(args.activation_offload_write_limit)
    if args.output is None:
        now = datetime.datetime.now()
        args.output = OUTPUT / "runs" / f"rok-{now:%Y%m%d-%H%M%S}"
    if args.output.exists() and any(args.output.iterdir()):
        raise ConfigurationError(f"--output {args.output} is not empty; name a new folder")
    # What the trainer's flags are made from, see `training_flags`: random tokens will do.
    args.mock_data = args.data_path is None


def _check_script(args: argparse.Namespace) -> None:
    """Also sets what a script decides itself: how large a batch is."""
    check_script(args.script)
    chosen = args.strategies or [one for one in DEFAULT_STRATEGIES if one != "selective"]
    if "selective" in chosen:
        raise ConfigurationError(
            "selective is Megatron's own recomputation; leave it out of --strategies with --script"
        )
    args.strategies, args.micro_batch_sizes = chosen, [1]


def _take(args: argparse.Namespace, training: MeasuredCommand) -> None:
    """Sets what the training command says, where the flags of rok do not."""
    if args.micro_batch_sizes is None and training.micro_batch_size is not None:
        args.micro_batch_sizes = [training.micro_batch_size]
    if args.activation_offload_dir is None:
        args.activation_offload_dir = training.directory
    if training.num_stages > 1:
        if args.strategies is None:
            args.strategies = [one for one in DEFAULT_STRATEGIES if one != "suffix"]
        if "suffix" in args.strategies:
            raise ConfigurationError(
                "suffix is a plan for one pipeline stage, and the training command has "
                f"{training.num_stages}; leave it out of --strategies"
            )


def _budgets(text: str) -> int | list[int]:
    """A number of them, or sizes. A bare number is a size from a KiB up."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and parts[0].isdigit() and int(parts[0]) < 1024:
        return count(parts[0])
    sizes = [size(part) for part in parts]
    if not sizes or min(sizes) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} has no size above 0; write 120MiB,200MiB")
    return sorted(set(sizes))
