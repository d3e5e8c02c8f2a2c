#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a sequence trains in a memory that the system enforces, beside what others reach.

    tools/check/longest_in_a_cgroup.py --json reach.json      # 20 to 45 minutes on 2 cores

The model and the ways are those of `tools/bench/long.py`: a Llama of 8 layers of 512, vocabulary
32000, bf16. The limit is what transformers' checkpointing takes for `--tokens`: the control group
in which that trains, and in which a sequence that is longer by a step is killed. In a group with
this limit then train, each in a process of its own, DeepSpeed's tiles with checkpointing, and ours
(layers recomputed with inputs on the SSD, chunked loss, tiled MLPs), as far as they go: what is
claimed has trained, and a step more was killed. A step is 1/16 of the length.

`speed_ratio_at_2s`: tokens a second of ours over DeepSpeed's at twice `--tokens`, without a limit.

Exit code: 0 if ours reaches 8 times as far as checkpointing and 1.25 times as far as DeepSpeed's,
at 0.9 of its speed or more; 1 if not; 2 if it could not be measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tools")]

from check.memory_group import CheckError, memory_group, run_in_group  # noqa: E402
from megatron.offload.commands.longest.search import Measured, search  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.machine.allocator import allocator_environment  # noqa: E402
from megatron.offload.sizes import MIB, format_size  # noqa: E402

_STEP = 16  # a step is this part of a length
_TIMES, _TIMES_DEEPSPEED, _SPEED = 8.0, 1.25, 0.9
_MULTIPLE = 32
Train = Callable[[str, int, int | None], dict[str, Any] | None]


def longer(tokens: int, steps: int = 1) -> int:
    """A length that is longer, or shorter, by some steps."""
    for _ in range(abs(steps)):
        more = max(tokens // _STEP // _MULTIPLE, 1) * _MULTIPLE
        tokens += more if steps > 0 else -more
    return tokens


def limit_of(tokens: int, train: Train) -> tuple[int, int]:
    """The limit in which checkpointing trains so many tokens and no step more; and its peak.

    Raises:
        CheckError: none was found between 0.9 and 1.3 of its resident set.
    """
    found = train("checkpointing", tokens, None)
    assert found is not None
    peak_bytes = found["device_bytes"]
    for percent in range(90, 131, 2):
        limit_bytes = peak_bytes * percent // 100
        if train("checkpointing", tokens, limit_bytes) is not None:
            return limit_bytes, peak_bytes
    raise CheckError(f"checkpointing trains {tokens} tokens in no limit near {peak_bytes} bytes")


def reach_of(way: str, tokens: int, limit_bytes: int, peak_bytes: int, train: Train) -> int:
    """The longest that trains within a limit, where a step more is killed.

    Args:
        way: that trains.
        tokens: to begin with.
        limit_bytes: of the group.
        peak_bytes: the resident set that is about as much.
        train: trains.
    """

    def measure(number: int) -> Measured:
        found = train(way, number, None)
        assert found is not None
        return Measured(number, found["device_bytes"], found["step_s"][-1])

    reached = search(
        measure, first=tokens // 2, multiple=_MULTIPLE, most=1 << 20, budget_bytes=peak_bytes
    ).longest
    while train(way, reached, limit_bytes) is None:
        reached = longer(reached, -1)
        if reached < tokens:
            raise CheckError(f"{way} does not train {tokens} tokens in {limit_bytes} bytes")
    while train(way, longer(reached), limit_bytes) is not None:
        reached = longer(reached)
    return reached


def in_process(args: argparse.Namespace, bar: Any) -> Train:
    """Trains in a process of its own, in a control group if there is a limit."""

    def train(way: str, tokens: int, limit_bytes: int | None) -> dict[str, Any] | None:
        limit = "" if limit_bytes is None else f" in {format_size(limit_bytes)}"
        bar.set_description(f"{way}, {tokens} tokens{limit}")
        command = [sys.executable, str(ROOT / "tools/bench/long.py"), "--train", way]
        for name in ("layers", "hidden", "vocabulary", "directory", "steps"):
            command += [f"--{name}", str(getattr(args, name))]
        found = run_in_group([*command, "--tokens", str(tokens)], limit_bytes)
        ending = "killed" if found is None else format_size(found["device_bytes"])
        bar.write(f"{way}, {tokens} tokens{limit}: {ending}", file=sys.stderr)
        bar.update()
        return found

    return train


def speed_ratio(tokens: int, train: Train) -> float:
    """Tokens a second of ours over those of DeepSpeed's, in turns."""
    ratios = []
    for _ in range(3):
        found = [train(way, tokens, None) for way in ("tiled", "deepspeed")]
        ours, theirs = (statistics.median(one["step_s"][1:]) for one in found if one is not None)
        ratios.append(theirs / ours)
    return statistics.median(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=32000, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="of each run; default: %(default)s")
    parser.add_argument("--directory", type=Path, help="on the SSD; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first counts for nothing; give 2 or more")
    os.environ.update(allocator_environment(keeps_for_reuse=False))
    os.environ["PYTHONPATH"] = str(ROOT / "tools")
    with tempfile.TemporaryDirectory() as folder, tqdm(unit="run") as bar:
        args.directory = args.directory or Path(folder)
        try:
            with memory_group(1 << 40):  # whether one can be made, before minutes are spent
                pass
            summary = measure(args.tokens, in_process(args, bar))
        except (CheckError, subprocess.TimeoutExpired) as error:
            print(f"longest_in_a_cgroup.py: error: {error}", file=sys.stderr)
            return 2
        facts = machine_facts(args.directory)
    rows = [
        ["checkpointing", summary["checkpointing_tokens"], 1.0],
        *(
            [name, summary[key], summary[key] / summary["checkpointing_tokens"]]
            for name, key in (("DeepSpeed's tiles", "deepspeed_tokens"), ("ours", "our_tokens"))
        ),
    ]
    print(f"in {summary['limit_bytes'] / MIB:,.0f} MiB; a step more of each was killed")
    print(tabulate(rows, ["", "tokens", "times"], tablefmt="github", floatfmt=".2f"))
    print(f"speed at {2 * args.tokens} tokens, ours over DeepSpeed's: ", end="")
    print(f"{summary['speed_ratio_at_2s']:.2f}")
    if args.json is not None:
        values = {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["tools/check/longest_in_a_cgroup.py", *(argv or sys.argv[1:])]),
            "machine": facts,
            **{name: getattr(args, name) for name in ("layers", "hidden", "vocabulary")},
            "summary": summary,
        }
        args.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0 if holds(summary) else 1


def measure(tokens: int, train: Train) -> dict[str, Any]:
    """The summary. Raises CheckError."""
    limit_bytes, peak_bytes = limit_of(tokens, train)
    reached = tokens
    while train("checkpointing", longer(reached), limit_bytes) is not None:
        reached = longer(reached)
    found = {"limit_bytes": limit_bytes, "checkpointing_tokens": reached}
    for key, way in (("deepspeed_tokens", "deepspeed"), ("our_tokens", "tiled")):
        found[key] = reach_of(way, tokens, limit_bytes, peak_bytes, train)
    return {**found, "speed_ratio_at_2s": speed_ratio(2 * tokens, train)}


def holds(summary: dict[str, Any]) -> bool:
    """Whether ours reaches as far and is as fast as it should."""
    ours = summary["our_tokens"]
    return bool(
        ours >= _TIMES * summary["checkpointing_tokens"]
        and ours >= _TIMES_DEEPSPEED * summary["deepspeed_tokens"]
        and summary["speed_ratio_at_2s"] >= _SPEED
    )


if __name__ == "__main__":
    sys.exit(main())
