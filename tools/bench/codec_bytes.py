#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a codec spares: bytes, peaks and steps of models of transformers, beside none.

    tools/bench/codec_bytes.py --json codec-bytes.json                # some 10 minutes on 2 cores
    tools/bench/codec_bytes.py --write-limit 150MB/s --dtypes float32

Each way of training is a process of its own, and they take turns, a step each; replay is on in all
of them. Of each codec beside the same placement without: `bytes_ratio` is of the bytes that go to
the tier in a step, `step_time_ratio` and `ssd_peak_ratio` are of steps with everything on the SSD;
with `keep` nothing moves, and `keep_peak_ratio`, `keep_time_ratio` are those. `loss_identical`: the
first loss has the same bits in all ways.

Exit code: 0 all identical, 1 not, 2 it could not be measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "tools"))

from bench.replay import (  # noqa: E402
    DTYPES,
    SETTLED,
    Way,
    allocator,
    arguments,
    measured,
    trained_in_turns,
)
from megatron.offload.commands.training_runs.run import Run, RunError, paired_ratio  # noqa: E402

CODECS = ("int8", "int4")
_COLUMNS = (
    *("bytes_ratio", "step_time_ratio", "ssd_peak_ratio"),
    *("keep_peak_ratio", "keep_time_ratio"),
)


def ways(limit: str | None, min_bytes: str) -> list[Way]:
    """Everything kept and everything on the SSD, without a codec and with each."""
    found = []
    for mode in ("keep", "ssd"):
        for codec in ("off", *CODECS):
            settings = {"mode": mode, "codec": codec, "min_bytes": min_bytes}
            if mode == "ssd" and limit is not None:
                settings["write_bytes_per_s"] = limit
            found.append(Way(f"{mode}-{codec}", allocator(), json.dumps(settings)))
    return found


def figures(runs: dict[str, Run]) -> dict[str, Any]:
    """What the runs of a model show, by codec."""
    peaks = {name: one.peak_bytes(SETTLED) for name, one in runs.items()}
    moved = {name: one.offload_median("offloaded_bytes", SETTLED) for name, one in runs.items()}
    first = {one.steps[0]["loss"] for one in runs.values()}
    found: dict[str, Any] = {
        codec: {
            "loss_identical": len(first) == 1,
            "bytes_ratio": moved[f"ssd-{codec}"] / moved["ssd-off"],
            "step_time_ratio": paired_ratio([runs[f"ssd-{codec}"]], [runs["ssd-off"]], SETTLED),
            "ssd_peak_ratio": peaks[f"ssd-{codec}"] / peaks["ssd-off"],
            "keep_peak_ratio": peaks[f"keep-{codec}"] / peaks["keep-off"],
            "keep_time_ratio": paired_ratio([runs[f"keep-{codec}"]], [runs["keep-off"]], SETTLED),
        }
        for codec in CODECS
    }
    found["offloaded_bytes"] = moved["ssd-off"]
    found["step_s"] = {name: one.step_time_s(SETTLED) for name, one in runs.items()}
    found["peak_bytes"] = peaks
    return found


def main() -> int:
    """Measures; the exit code."""
    args = arguments(__doc__, "llama", ",".join(DTYPES)).parse_args()
    args.models, args.dtypes = args.models.split(","), args.dtypes.split(",")
    found = ways(args.write_limit, args.min_bytes)

    def measure(model: str, dtype: str, folder: Path, bar: Any) -> dict[str, Any]:
        return figures(trained_in_turns(args, model, dtype, found, folder, bar))

    try:
        result = measured("codec_bytes", args, measure)
    except RunError as error:
        print(f"codec_bytes: error: {error}", file=sys.stderr)
        return 2
    every = [
        (name, codec, one[codec]) for name, one in result["models"].items() for codec in CODECS
    ]
    rows = [
        (
            *(name, codec, "identical" if one["loss_identical"] else "DIFFERENT"),
            *(f"{one[column]:.3f}" for column in _COLUMNS),
        )
        for name, codec, one in every
    ]
    header = ("model", "codec", "loss", "moved", "step, ssd", "peak, ssd", "peak, keep")
    print(tabulate(rows, headers=(*header, "step, keep"), disable_numparse=True))
    return 0 if all(one["loss_identical"] for _, _, one in every) else 1


if __name__ == "__main__":
    sys.exit(main())
