# SPDX-License-Identifier: Apache-2.0
"""The command `megatron-offload`. Each subcommand reads its flags and calls one function.

megatron-offload doctor [--activation-offload-dir DIR ...] [--json] [-- torchrun ... SCRIPT FLAGS]
megatron-offload plan (--profile FILE | --hardware GPU --num-layers N ...) [--output PLAN.json]
megatron-offload plan --hardware GPU -- torchrun ... SCRIPT FLAGS
megatron-offload rok [--micro-batch-sizes N,...] [--budgets N] [--check] [-- torchrun ... FLAGS]
megatron-offload longest --device-memory-budget SIZE [--check] --script FILE --script-args TEXT
megatron-offload estimate MODEL [--hardware GPU] [--batch N] [--sequence N] [--lora RANK]
megatron-offload tune [--tokens-per-step MIN-MAX] [--check] -- torchrun ... SCRIPT FLAGS
megatron-offload bench [--directory DIR] [--quick] [--json FILE] [--plot FILE]
megatron-offload report (runs/NAME/metrics.jsonl ... | --script train.py | -- torchrun ... FLAGS)
megatron-offload report --memory FILE [--picture PNG]

doctor, rok and report also take a training script that calls `offload_activations`, with --script.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.offload.commands.bench import arguments as benchmark
from megatron.offload.commands.doctor.examine import examine
from megatron.offload.commands.estimate import arguments as needs
from megatron.offload.commands.launch_command import LaunchCommand
from megatron.offload.commands.longest import arguments as lengths
from megatron.offload.commands.memory.command import explain_memory
from megatron.offload.commands.plan import arguments as planning
from megatron.offload.commands.report import compare_command, compare_runs, compare_script
from megatron.offload.commands.rok import arguments as curve
from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.script import add_script_arguments, flags_of_script
from megatron.offload.commands.tune import arguments as tuning
from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.integration.megatron.arguments import add_offload_arguments
from megatron.offload.integration.megatron.versions import SUPPORTED_VERSIONS
from megatron.offload.packages import check_packages
from megatron.offload.planner.libraries import check_libraries
from megatron.offload.version import __version__

# Commands whose flags are in a file of their own, and what the help says of them.
_WITH_FLAGS: dict[str, tuple[Any, str]] = {
    "plan": (
        planning,
        "what to keep, recompute and offload, and what a step should take; runs nothing",
    ),
    "rok": (
        curve,
        "measure speed against activation memory of all strategies on this machine, and draw",
    ),
    "longest": (
        lengths,
        "the longest sequence, largest batch or most layers that fit, with each step against "
        "memory",
    ),
    "estimate": (
        needs,
        "the memory that a model of transformers needs to train, and what makes it fit; runs "
        "nothing",
    ),
    "tune": (
        tuning,
        "micro-batch size, number of micro-batches and layer-major units, from short runs",
    ),
    "bench": (
        benchmark,
        "measure bandwidth and processor time of the storage tiers, beside fio",
    ),
}


class _CommandParser(argparse.ArgumentParser):
    """A subcommand's parser, which speaks for itself: argparse has unknown flags refused with the
    usage of the program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse; nothing is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit code (2: bad input, said in one sentence)."""
    parser = argparse.ArgumentParser(
        prog="megatron-offload",
        description="Activation offload for Megatron. Training is started by your own script or "
        "examples/pretrain_gpt.sh; this command checks and plans before, and shows what runs did.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)
    doctor = commands.add_parser(
        "doctor",
        help="whether the flags should work on this machine: disks, memory, GPU, versions",
        usage="%(prog)s [-h] [--json] [--no-bandwidth] [--script FILE [--script-args TEXT]] "
        "[OFFLOAD FLAGS] [-- LAUNCH COMMAND]",
        description="Checks this machine and says what to do where something is missing. Takes "
        "the flags that a trainer takes, or after -- the whole command that starts it, of which "
        "nothing is run. Exit code 1: they cannot work.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    doctor.add_argument(
        "--no-bandwidth",
        action="store_true",
        help="do not measure the drives, which takes up to 10 seconds for each directory",
    )
    _add_launch_command(doctor)
    add_script_arguments(doctor)
    add_offload_arguments(doctor)
    for name, (its_flags, purpose) in _WITH_FLAGS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=its_flags.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        its_flags.add_arguments(command)
        if name in ("plan", "rok"):
            _add_launch_command(command)
    report = commands.add_parser(
        "report",
        help="table of runs: losses, step time, peak memory, bytes moved; what a peak is made of",
        description="Prints a row for each run: medians over all steps but the first. The first "
        "run is the one that others are compared with. With --script, a script that calls "
        "offload_activations is run without offload and as it is, and so is, after --, a command "
        "that starts a training, of Megatron-LM through megatron.offload.launch. With --memory, "
        "the largest peak in a file of --activation-memory-report is explained.",
    )
    report.add_argument(
        "metrics", nargs="*", type=Path, help="a run's metrics.jsonl, or the folder with it"
    )
    report.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="with files: also write one page with pictures of times, memory and bytes over steps",
    )
    add_script_arguments(report)
    report.add_argument(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help="with --script or a command: steps of each run; default: 8",
    )
    report.add_argument("--memory", type=Path, metavar="FILE", help="a run's memory report")
    report.add_argument(
        "--picture", type=Path, metavar="PNG", help="with --memory: draw the step of that peak"
    )
    words = list(sys.argv[1:] if argv is None else argv)
    launch: list[str] = []
    if words[:1] == ["report"] and "--" in words:  # its files are positional too
        place = words.index("--")
        words, launch = words[:place], words[place + 1 :]
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if args.command == "report":
        args.launch = launch
        given = (bool(args.metrics), args.script is not None, args.memory is not None, bool(launch))
        if sum(given) != 1:
            report.error("give either files, --script, --memory, or a training command after --")
        if args.picture is not None and args.memory is None:
            report.error("--picture is for --memory")
        if args.html is not None and not args.metrics:
            report.error("--html is for the files of runs")
    for stream in (sys.stdout, sys.stderr):  # names of files and mounts need not be UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if args.command == "doctor" and args.script is not None:
            doctor.parse_args(flags_of_script(args.script, args.script_args), args)
        return _run(args, argv)
    except KeyboardInterrupt:
        return 130
    except (ConfigurationError, RunError) as error:
        sentence = str(error).removeprefix(PREFIX)
        print(f"megatron-offload: error: {sentence}", file=sys.stderr)
        return 2
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"megatron-offload: error: {what}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Runs the subcommand, and imports what brings scipy, numba or tqdm for it alone."""
    typed = ["megatron-offload", *(sys.argv[1:] if argv is None else argv)]
    if args.command == "doctor":
        return _doctor(args)
    if args.command == "plan":
        check_libraries("megatron-offload plan")
        from megatron.offload.commands.plan.command import run as run_plan

        return run_plan(args)
    if args.command == "rok":
        curve.check_arguments(args)  # before what may not be installed is imported
        from megatron.offload.commands.rok.command import run as run_rok

        return run_rok(args, typed)
    if args.command == "longest":
        lengths.check_arguments(args)
        from megatron.offload.commands.longest.command import run as run_longest

        return run_longest(args)
    if args.command == "estimate":
        needs.check_arguments(args)
        from megatron.offload.commands.estimate.command import run as run_estimate

        return run_estimate(args)
    if args.command == "tune":
        check_packages("megatron-offload tune", "tqdm")
        from megatron.offload.commands.tune.command import run as run_tune

        return run_tune(args, typed)
    if args.command == "bench":
        benchmark.check_arguments(args)
        from megatron.offload.commands.bench.command import restart_with_allocator, run

        if argv is None and args.device == "cpu":
            restart_with_allocator()  # in a process of its own
        return run(args, typed)
    if args.memory is not None:
        print(explain_memory(args.memory, args.picture))
    elif args.script is not None:
        print(compare_script(args.script, args.script_args, args.steps))
    elif args.launch:
        print(compare_command(args.launch, args.steps))
    else:
        print(compare_runs(args.metrics, args.html))
    return 0


def _add_launch_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "launch",
        nargs="*",
        metavar="LAUNCH COMMAND",
        help="after --: the command that starts the training, torchrun and all, or its flags",
    )


def _doctor(args: argparse.Namespace) -> int:
    """Exit code 0: the flags can work; 1: they cannot."""
    ours = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_offload_arguments(ours)
    others = LaunchCommand.of(args.launch).read(ours, args)
    found = examine(
        args,
        supported_megatron=SUPPORTED_VERSIONS,
        measures_bandwidth=not args.no_bandwidth,
        needs_megatron=args.script is None,
        not_looked_at=others,
    )
    if args.json:
        print(found.as_json())
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(found.as_text(colour, min(shutil.get_terminal_size((100, 24)).columns, 100)))
    return 0 if found.works else 1


if __name__ == "__main__":
    sys.exit(main())
