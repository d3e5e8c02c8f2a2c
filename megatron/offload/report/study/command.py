# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload plan`, from flags to what is printed and written: `run`. The CLI calls it."""

from __future__ import annotations

import argparse

from megatron.offload.placement.plan_file import save_plans
from megatron.offload.placement.whole_file import check_place, write_whole
from megatron.offload.report.study.arguments import request_of
from megatron.offload.report.study.curve import check_picture, draw
from megatron.offload.report.study.study import all_stages, study_of
from megatron.offload.report.study.text import as_json, as_text


def run(args: argparse.Namespace) -> int:
    """Prints the study and writes what was asked for.

    Raises:
        ConfigurationError: bad input, or nothing fits.
        OSError: a file cannot be read or written.
    """
    if args.rok is not None:
        check_picture(args.rok)
    for path in (args.output, args.json, args.rok):
        if path is not None:
            check_place(path)  # before seconds of planning
    request = request_of(args)
    study = study_of(request, with_curve=args.rok is not None or args.json is not None)
    plans = all_stages(request) if args.output is not None else []
    print(as_text(study))
    if args.output is not None:
        save_plans(args.output, plans or [study.plan])
    if args.json is not None:
        write_whole(args.json, as_json(study))
    if args.rok is not None:
        draw(study, args.rok)
    return 0
