# SPDX-License-Identifier: Apache-2.0
"""The command `megatron-offload`. Each subcommand reads its flags and calls one function.

megatron-offload report runs/NAME/metrics.jsonl [...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.offload.errors import ConfigurationError
from megatron.offload.report.runs import compare_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit code (2: bad input, said in one sentence)."""
    parser = argparse.ArgumentParser(
        prog="megatron-offload",
        description="Activation offload for Megatron. Training is started by your own script or "
        "examples/pretrain_gpt.sh; this command shows what runs did.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="table of runs: losses, step time, peak activation memory, bytes moved",
        description="Prints a row for each run: medians over all steps but the first. The first "
        "run is the one that others are compared with.",
    )
    report.add_argument("metrics", nargs="+", type=Path, help="a run's metrics.jsonl")
    args = parser.parse_args(argv)
    try:
        print(compare_runs(args.metrics))
    except (ConfigurationError, OSError) as error:
        print(f"megatron-offload: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
