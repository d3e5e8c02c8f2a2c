# SPDX-License-Identifier: Apache-2.0
"""Shows again what `megatron-offload bench` measured: its tables and its picture.

    tools/plot/storage.py bench.json --output bench.png

Bars are medians over the rounds, whiskers the smallest and the largest round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.offload.commands.bench.picture import draw
from megatron.offload.commands.bench.text import format_table, system_lines
from megatron.offload.documents import FAULTS, from_json, reason_of


def main(argv: list[str] | None = None) -> int:
    """Reads the file, prints and draws; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="a file of megatron-offload bench --json")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    args = parser.parse_args(argv)
    try:
        result = from_json(args.result.read_bytes())
        print(system_lines(result["machine"]) + "\n")
        for tier in dict.fromkeys(point["tier"] for point in result["figures"]):
            own = [point for point in result["figures"] if point["tier"] == tier]
            print(f"{tier}\n{format_table(own)}\n")
        draw(result, args.output)
    except (OSError, *FAULTS) as error:
        reason = reason_of(error)
        parser.error(f"{args.result} is no result of megatron-offload bench --json: {reason}")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
