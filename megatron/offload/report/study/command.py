# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload plan`, from flags to what is printed and written: `run`. The CLI calls it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from megatron.offload.placement.plan_file import save_plans
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
    request = request_of(args)
    with _silent_libraries():
        study = study_of(request, with_curve=args.rok is not None or args.json is not None)
        plans = all_stages(request) if args.output is not None else []
    print(as_text(study))
    if args.output is not None:
        save_plans(args.output, plans or [study.plan])
    if args.json is not None:
        args.json.write_text(as_json(study))
    if args.rok is not None:
        draw(study, args.rok)
    return 0


@contextlib.contextmanager
def _silent_libraries() -> Iterator[None]:
    """HiGHS writes lines of its own to standard output now and then, whatever it is told."""
    sys.stdout.flush()
    library = ctypes.CDLL(None)
    with contextlib.ExitStack() as stack:
        kept = os.dup(1)
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        stack.callback(library.fflush, None)  # while it still goes to nowhere
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
