# SPDX-License-Identifier: Apache-2.0
"""What the benchmark prints: `system_lines`, `format_table`.

`command.py` prints a table after each tier. Points are plain values, as they stand under "figures"
in the JSON file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from megatron.offload.sizes import format_size


def system_lines(facts: dict[str, Any]) -> str:
    """What the measurements depend on, a line for each kind of thing."""
    drives = ", ".join(facts["drives"]) or "unknown drive"
    lines = [
        f"system: kernel {facts['kernel']}, {facts['cpu']}, {facts['cores']} cores, "
        f"{format_size(facts['memory_bytes'])}, python {facts['python']}, torch {facts['torch']}",
        f"directory: {facts['offload_filesystem']}, {drives}",
        f"tiers: memory from {facts['allocator']}, {facts['huge_page_share']:.0%} of a sample on "
        "transparent huge pages",
    ]
    if facts["fio"]:
        lines.append("{version}: {engine}, direct=1; memory from {memory}".format(**facts["fio"]))
    return "\n".join(lines)


def format_table(points: Sequence[dict[str, Any]]) -> str:
    """The table of one tier; without a reference it has no columns for one."""
    reference = points[0]["reference"]
    parts = (
        {"ours": "ours", "reference": reference, "ratio": "ratio"} if reference else {"ours": ""}
    )

    def cells(compared: dict[str, float | None], digits: int) -> list[str]:
        return [
            ""
            if (value := compared[part]) is None
            else f"{value:.{3 if part == 'ratio' else digits}f}"
            for part in parts
        ]

    return tabulate(
        [
            (
                format_size(point["block_bytes"]),
                str(point["depth"]),
                point["operation"],
                *cells(point["gbps"], 2),
                *cells(point["cpu_s_per_gb"], 4),
            )
            for point in points
        ],
        headers=[
            *("block", "depth", "operation"),
            *(f"GB/s\n{name}".rstrip() for name in parts.values()),
            *(f"CPU s/GB\n{name}".rstrip() for name in parts.values()),
        ],
        disable_numparse=True,
        colalign=("right", "right", "left", *["right"] * 2 * len(parts)),
    )
