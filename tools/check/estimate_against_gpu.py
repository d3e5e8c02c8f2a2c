#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether `megatron-offload estimate` says what trainings took on a GPU, of what gpu_day.py wrote.

    tools/check/estimate_against_gpu.py docs/results/gpu/h100/results.json

Needs no GPU: peaks were measured by `tools/gpu_day.py`, in whose steps gradients stay in memory, as
they do between micro-batches. Ways that `estimate` does not know are left out: `auto`, codecs,
compiled graphs, other packages.

Exit code: 0 if each estimate is within --tolerance of what was measured, 1 if one is not, 2 if the
file has nothing to compare with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]

from check.gpu_day.models import config_of, rank_of  # noqa: E402
from check.gpu_day.settings import Shape  # noqa: E402
from megatron.offload.commands.estimate.model import Adapters, Architecture  # noqa: E402
from megatron.offload.commands.estimate.saved import MOVE, REPLAY  # noqa: E402
from megatron.offload.commands.estimate.step import PLAIN, Pass, step_bytes  # noqa: E402
from megatron.offload.commands.estimate.ways import Training, Way, need_of  # noqa: E402
from megatron.offload.sizes import GIB  # noqa: E402

_PASSES = {  # of gpu_day's ways
    "none": PLAIN,
    "checkpointing": Pass(checkpoints=True),
    "replay": Pass(REPLAY),
    "host_replay": Pass(MOVE),
    "chunked_host": Pass(MOVE, checkpoints=True, chunks_loss=True),
    "recompute_host": Pass(MOVE, checkpoints=True),
}


class Compared(NamedTuple):
    """A training: what was estimated and measured at its peak, in bytes."""

    name: str
    estimated: float
    measured: float
    phase: str

    @property
    def error(self) -> float:
        """Of the estimate: 0.1 is a tenth too high."""
        return self.estimated / self.measured - 1


def compare(day: dict[str, Any]) -> Iterator[Compared]:
    """Estimates each training of a gpu_day.py's results.json that `estimate` knows."""
    for name, result in sorted(day["results"].items()):
        found = result["found"] if result["status"] == "ok" else {}
        if "peak_bytes" not in found or found["way"] not in _PASSES:
            continue
        if found["states"] not in ("device", "host") or found.get("frozen") not in (None, "device"):
            continue
        training = Training(tier="host")
        way = Way(name, _PASSES[found["way"]], states_move=found["states"] == "host")
        step = step_bytes(
            _architecture(found),
            found["shape"]["batch"],
            found["shape"]["seq"],
            way.how,
            accumulates=True,
        )
        need = need_of(way, step, training)
        yield Compared(name, need.device, found["peak_bytes"], need.phase)


def _architecture(found: dict[str, Any]) -> Architecture:
    shape = Shape(**{one.name: found["shape"][one.name] for one in dataclasses.fields(Shape)})
    adapters = None if found.get("frozen") is None else Adapters(rank_of(shape), "all-linear")
    return Architecture(config_of(shape), "bf16", adapters)


def main(argv: list[str] | None = None) -> int:
    """Estimates and prints; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="results.json of gpu_day.py")
    parser.add_argument("--tolerance", type=float, default=0.1, help="default: %(default)s")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    day = json.loads(args.results.read_text())
    found = list(compare(day))
    if not found:
        print(f"{args.results} has no training that estimate knows", file=sys.stderr)
        return 2
    rows = [
        [
            one.name,
            f"{one.estimated / GIB:.2f}",
            f"{one.measured / GIB:.2f}",
            f"{one.error:+.1%}",
            one.phase,
        ]
        for one in found
    ]
    print(day["machine"])
    heads = ["training", "estimated GiB", "measured GiB", "error", "peak in"]
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))
    return 0 if all(abs(one.error) <= args.tolerance for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
