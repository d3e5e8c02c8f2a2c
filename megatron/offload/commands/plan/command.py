# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload plan`, from flags to what is printed and written: `run`. The CLI calls it."""

from __future__ import annotations

import argparse
import sys

from megatron.offload.activations.placement.atomic_file import check_place, write_atomically
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.commands.drawing import check_picture
from megatron.offload.commands.plan import schedules
from megatron.offload.commands.plan.arguments import read_launch_command
from megatron.offload.commands.plan.comparison import all_stages, compare_plans
from megatron.offload.commands.plan.curve import draw
from megatron.offload.commands.plan.request import request_of
from megatron.offload.commands.plan.schedules_picture import draw_schedules
from megatron.offload.commands.plan.text import as_json, as_text


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes what was asked for.

    Raises:
        ConfigurationError: bad input, or nothing fits.
        OSError: a file cannot be read or written.
    """
    for sentence in read_launch_command(args, args.launch):
        print(sentence)
    for flag, path in (("--rok", args.rok), ("--plot", args.plot)):
        if path is not None:
            check_picture(flag, path)
    for path in (args.output, args.json, args.rok, args.plot):
        if path is not None:
            check_place(path)  # before seconds of planning
    if args.parameter_offload != "off":
        return _compare_schedules(args)
    request = request_of(args)
    if sys.stderr.isatty():
        print("planning, which takes seconds to minutes ...", file=sys.stderr, flush=True)
    comparison = compare_plans(request, with_curve=args.rok is not None or args.json is not None)
    plans = all_stages(comparison) if args.output is not None else []
    print(as_text(comparison))
    if args.output is not None:
        save_plans(args.output, plans or [comparison.plan])
    if args.json is not None:
        write_atomically(args.json, as_json(comparison))
    if args.rok is not None:
        draw(comparison, args.rok)
    return 0


def _compare_schedules(args: argparse.Namespace) -> int:
    found = schedules.schedules_of(args)
    print(schedules.as_text(found))
    if args.json is not None:
        write_atomically(args.json, schedules.as_json(found))
    if args.plot is not None:
        draw_schedules(found, args.plot)
    return 0
