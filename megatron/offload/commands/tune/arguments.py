# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload tune`: `add_arguments`, `request_of`."""

from __future__ import annotations

import argparse
import datetime
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.flag_values import count, counts, number
from megatron.offload.commands.training_runs.trainer import OUTPUT, TRAINER
from megatron.offload.commands.tune.candidates import MEMORY_MARGIN, StepSize
from megatron.offload.commands.tune.runs import HowLong
from megatron.offload.commands.tune.setting import Setting, settings_to_measure
from megatron.offload.commands.tune.training_command import TrainingCommand
from megatron.offload.device.cuda import has_cuda
from megatron.offload.errors import ConfigurationError

_BEYOND = 4  # micro-batch sizes up to so many times the largest measured one are tried

DESCRIPTION = """\
Chooses micro-batch size, number of micro-batches and --layer-major-units of a training command,
once and before it starts, as SpeedLoader does (NeurIPS 2024): tune measures a few short trainings,
fits seconds, device memory, host memory and SSD space to them by linear models, and predicts every
candidate. The choice has the most tokens a second of those that keep to the limits.

  megatron-offload tune --tokens-per-step 4096-16384 --output best.txt -- \\
      examples/pretrain_gpt.py --num-layers 8 --seq-length 256 --mock-data \\
      --activation-offload ssd --activation-offload-dir /mnt/nvme0 --device-memory-budget 4GiB
  examples/pretrain_gpt.sh ... $(cat best.txt)
  megatron-offload tune -- torchrun --nproc-per-node 2 -m megatron.offload.launch \\
      Megatron-LM/pretrain_gpt.py --pipeline-model-parallel-size 2 --global-batch-size 16 ...

The command that you train with comes after --, torchrun and all; tune starts it on this machine
with this Python. Of a pipeline the best candidates are always measured too, as with --check: its
stages share a machine here, and trainings of several processes cannot take turns. The command gives
the limits: --device-memory-budget
(weights, states and activations of a rank; on a CPU the process), --activation-offload-host-budget,
--activation-offload-ssd-budget and the room on the drives. --tokens-per-step, or its
--global-batch-size, gives the size of a step. tune replaces its --micro-batch-size and
--layer-major-units, and leaves out flags of checkpoints and of the schedule.

With a --device-memory-budget the best candidates are measured too, one after the other, until one
keeps to it: six trainings at most. Only settings that were measured can be chosen then.
Activations that wait for a drive are in device memory too: tune sets
--activation-offload-inflight to 1 to 2 % of the budget (4MiB at least), unless the command has one;
it is measured so and belongs to the choice.

Exit code: 0 done, 2 it could not be measured, or nothing keeps to the limits."""


@dataclass(frozen=True)
class Request:
    """What is to be tuned, and how.

    Attributes:
        command: that is tuned.
        data_parallel_size: copies of the model.
        units: that are compared; 0 is micro-batch-major.
        to_measure: settings.
        how_long: each training is.
        output: folder of the trainings.
    """

    command: TrainingCommand
    data_parallel_size: int
    units: tuple[int, ...]
    to_measure: list[Setting]
    how_long: HowLong
    output: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of `megatron-offload tune`."""
    parser.add_argument(
        "training", nargs="*", metavar="SCRIPT FLAGS", help="the training command, after --"
    )
    choose = parser.add_argument_group("what is chosen")
    choose.add_argument(
        "--tokens-per-step",
        type=_tokens,
        metavar="MIN-MAX",
        help="tokens that a step of all ranks may have; tune chooses the number of micro-batches "
        "within it. Default: those of the command's --global-batch-size",
    )
    choose.add_argument(
        "--largest-micro-batch-size",
        type=count,
        metavar="N",
        help="largest micro-batch size to choose from; default: "
        f"{_BEYOND} times the largest that is measured",
    )
    choose.add_argument(
        "--units",
        type=_units,
        metavar="{off,auto,N},...",
        help="values of --layer-major-units to compare; off: one micro-batch after the other. "
        "Default: off,auto",
    )
    choose.add_argument(
        "--memory-margin",
        type=number(0, 0.999),
        default=MEMORY_MARGIN,
        metavar="FRACTION",
        help="part of the measured device memory that must be left of the budget, as another "
        "training with the same flags may take so much more; default: %(default)s",
    )
    measure = parser.add_argument_group("what is measured")
    measure.add_argument(
        "--micro-batch-sizes",
        type=_two,
        default=(1, 4),
        metavar="N,N",
        help="two sizes to measure; choose sizes that you would train with. Default: 1,4",
    )
    measure.add_argument(
        "--micro-batches",
        type=_two,
        metavar="N,N",
        help="two numbers of micro-batches of a step to measure; default: 2,4, in a pipeline half "
        "and twice its stages",
    )
    measure.add_argument(
        "--steps",
        type=count,
        default=4,
        metavar="N",
        help="measure at least so many steps of each training; default: 4",
    )
    measure.add_argument(
        "--seconds",
        type=number(0, 86_400),
        default=4.0,
        metavar="S",
        help="measure steps of at least so many seconds in all; default: 4",
    )
    measure.add_argument(
        "--skip-steps",
        type=count,
        default=2,
        metavar="N",
        help="first steps of each training that do not count; default: 2",
    )
    measure.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="ranks on this machine; torchrun starts more than one. Default: --nproc-per-node of "
        "the training command, or 1",
    )
    measure.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="trainings take turns, a step each, so that a temporary slowdown affects all of them "
        "equally; they must fit in memory at the same time, and the script must know "
        "--wait-for-input. Default: for the trainer of this checkout where there is no GPU",
    )
    measure.add_argument(
        "--check",
        action="store_true",
        help="measure the best candidate and its neighbours, six trainings at most, show predicted "
        "beside measured, and choose by what was measured",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write the flags of the choice, in one line"
    )
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures, in bytes and seconds"
    )
    output.add_argument(
        "--trainings",
        type=Path,
        metavar="DIR",
        help="folder for the output of the trainings; default: runs/tune-TIME",
    )


def request_of(args: argparse.Namespace) -> Request:
    """What the flags ask for.

    Raises:
        ConfigurationError: it cannot be done.
    """
    command = TrainingCommand.of(args.training, args.processes)
    args.processes = command.start.processes
    args.check = args.check or command.num_stages > 1
    data_parallel_size = command.data_parallel_size()
    if args.tokens_per_step is None and command.global_batch_size is None:
        raise ConfigurationError(
            "tune needs to know how large a step is: give --tokens-per-step MIN-MAX, or the "
            "training command a --global-batch-size"
        )
    if args.tokens_per_step is None:
        assert command.global_batch_size is not None
        if command.global_batch_size % data_parallel_size:
            raise ConfigurationError(
                f"--global-batch-size {command.global_batch_size} cannot be divided by the "
                f"{data_parallel_size} ranks that have samples of their own; change one of them"
            )
    is_ours = command.script.resolve().parent == TRAINER.parent
    if args.turns is None:
        args.turns = is_ours and args.processes == 1 and not has_cuda()
    if args.turns and args.processes > 1:
        raise ConfigurationError(
            "--turns works with one process, which reads its turns from its standard input; drop "
            "it or --processes"
        )
    units = _units_of(args.units, command)
    micro_batches = args.micro_batches or _counts_of(command)
    if args.trainings is None:
        now = datetime.datetime.now()
        args.trainings = OUTPUT / "runs" / f"tune-{now:%Y%m%d-%H%M%S}"
    if args.trainings.exists() and any(args.trainings.iterdir()):
        raise ConfigurationError(f"--trainings {args.trainings} is not empty; name a new folder")
    return Request(
        command=command,
        data_parallel_size=data_parallel_size,
        units=units,
        to_measure=settings_to_measure(args.micro_batch_sizes, micro_batches, units),
        how_long=HowLong(args.skip_steps, args.steps, args.seconds),
        output=args.trainings,
    )


def step_size_of(args: argparse.Namespace, request: Request, tokens_per_sample: float) -> StepSize:
    """How many samples a step may have on a rank.

    Raises:
        ConfigurationError: none.
    """
    largest = args.largest_micro_batch_size or _BEYOND * max(args.micro_batch_sizes)
    if args.tokens_per_step is None:
        assert request.command.global_batch_size is not None
        samples = request.command.global_batch_size // request.data_parallel_size
        return StepSize(samples, samples, largest)
    of_one = tokens_per_sample * request.data_parallel_size
    least, most = (tokens / of_one for tokens in args.tokens_per_step)
    found = StepSize(max(1, -int(-least // 1)), int(most), largest)
    if found.most < found.least:
        raise ConfigurationError(
            f"no step has {args.tokens_per_step[0]} to {args.tokens_per_step[1]} tokens: a sample "
            f"of each rank together has {of_one:.0f}; give a wider --tokens-per-step"
        )
    return found


def _counts_of(command: TrainingCommand) -> tuple[int, int]:
    """With fewer micro-batches than stages, a pipeline keeps less in memory than otherwise: one of
    two is, or what a micro-batch keeps could not be told from what the stages hold."""
    stages = command.num_stages
    return (stages // 2, 2 * stages) if stages > 1 else (2, 4)


def _units_of(asked: list[str] | None, command: TrainingCommand) -> tuple[int, ...]:
    in_one = command.recomputes_fully or command.num_stages > 1
    names = asked or (["off"] if in_one else ["off", "auto"])
    if command.num_stages > 1 and names != ["off"]:
        raise ConfigurationError(
            "--layer-major-units needs a model on one pipeline stage; leave --units out, or drop "
            "--pipeline-model-parallel-size"
        )
    if command.recomputes_fully and names != ["off"]:
        raise ConfigurationError(
            "--layer-major-units cannot be combined with --recompute-granularity full; leave "
            "--units out, or use --activation-recompute-layers"
        )
    if "auto" in names and command.num_layers is None:
        raise ConfigurationError(
            "--units auto makes each layer a unit, and the training command has no --num-layers; "
            "add it, or give --units off"
        )
    found = {0 if n == "off" else command.num_layers if n == "auto" else int(n) for n in names}
    most = max(one or 0 for one in found)
    if command.num_layers is not None and most > command.num_layers:
        raise ConfigurationError(
            f"--units {most}: the model has {command.num_layers} layers; give as many at most"
        )
    return tuple(sorted(one or 0 for one in found))


# -- Values from text -----------------------------------------------------------------------------


def _two(text: str) -> tuple[int, int]:
    found = counts(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} are not two different numbers; write 1,4")
    return found[0], found[1]


def _tokens(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = count(least), count(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write 4096-16384")
    return found


def _units(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ("off", "auto"):
            count(name)
    if not names:
        raise argparse.ArgumentTypeError("no value; write off,auto")
    return names
