#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What replay spares: models of transformers with `replay="on"` beside `replay="off"`.

    tools/bench/replay.py --json replay.json                         # all models; about an hour
    tools/bench/replay.py --models llama,gpt2 --dtypes float32 --layers 4 --hidden 256

Each way of training is a process of its own, and they take turns, a step each. `bytes_ratio` is of
the bytes that go to the tier in a step, on over off, with everything on the SSD. `step_time_ratio`
is the median of on over off in the same turn. With `keep` nothing moves: `peak_ratio` and
`keep_time_ratio` are those of a step with replay over one without offload. `identical`: losses,
gradients and weights of all ways have the same bits. `unreplayed_bytes` are those of a step that
are not computed again, by the operation that made them: `tools/write_replay.py` makes a table of
them.

Exit code: 0 all identical, 1 not, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from megatron.offload.commands.training_runs.machine import in_a_line, machine_facts
from megatron.offload.commands.training_runs.run import (
    Run,
    RunError,
    Variant,
    first_difference,
    order_of_round,
    paired_ratio,
)
from megatron.offload.commands.training_runs.trainer import Trainer
from megatron.offload.device.cuda import has_cuda

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("llama", "qwen3", "olmo", "gpt2", "bert", "llama-lora", "mixtral", "qwen3-moe")
DTYPES = ("float32", "bfloat16")
_FIELDS = ("loss", "gradients", "weights")
SETTLED = 3  # first steps, in which recipes are compared


@dataclass(frozen=True)
class Way(Variant):
    """A way to train, with its settings as JSON."""

    settings: str = "{}"


def ways(allocator: str, limit: str | None, min_bytes: str) -> list[Way]:
    """None, everything kept with replay, everything on the SSD without replay and with."""
    limited = {"min_bytes": min_bytes} | ({} if limit is None else {"write_bytes_per_s": limit})
    return [
        Way("none", allocator),
        Way(
            "keep", allocator, json.dumps({"mode": "keep", "replay": "on", "min_bytes": min_bytes})
        ),
        Way("ssd-without", allocator, json.dumps({"mode": "ssd", "replay": "off", **limited})),
        Way("ssd", allocator, json.dumps({"mode": "ssd", "replay": "on", **limited})),
    ]


def trained_in_turns(
    args: argparse.Namespace, model: str, dtype: str, found: list[Way], folder: Path, bar: Any
) -> dict[str, Run]:
    """Trains one model in all ways, a step each in turn; the runs by placement.

    Raises:
        RunError: a training failed.
    """
    flags = ["--model", model, "--dtype", dtype]
    for name in ("layers", "hidden", "sequence", "batch", "vocabulary"):
        flags += [f"--{name}", str(getattr(args, name))]
    trainer = Trainer(ROOT / "tools/bench/train_model.py", flags, args.directory)
    with contextlib.ExitStack() as ends:
        trainings = {}
        for way in found:
            bar.set_description(f"{model} {dtype} {way.placement}")
            kind = "none" if way.placement == "none" else "offload"
            settings = ["--way", kind, "--settings", way.settings]
            training = trainer.start(
                way.name, settings, way.allocator, folder / way.placement, in_turns=True
            )
            ends.callback(training.end)
            training.run(enough=lambda steps: len(steps) >= SETTLED)
            trainings[way] = training
        for turn in range(args.turns):
            for way in order_of_round(found, turn):
                trainings[way].step()
            bar.update()
        return {way.placement: Run(way, 0, one.steps, SETTLED) for way, one in trainings.items()}


def allocator() -> str:
    """Of all ways, so that peaks can be compared."""
    return "default" if has_cuda() else "offload"


def figures(runs: dict[str, Run]) -> dict[str, Any]:
    """What the runs of a model show."""
    none, keep, without, ssd = (runs[name] for name in ("none", "keep", "ssd-without", "ssd"))
    moved = [one.offload_median("offloaded_bytes", SETTLED) for one in (ssd, without)]
    return {
        "identical": all(
            first_difference(none, one, same_length=False, fields=_FIELDS) is None
            for one in runs.values()
        ),
        "bytes_ratio": moved[0] / moved[1],
        "offloaded_bytes": moved[1],
        "replayed_bytes": ssd.offload_median("replayed_bytes", SETTLED),
        "unreplayed_bytes": ssd.steps[-1]["unreplayed"],
        "step_time_ratio": paired_ratio([ssd], [without], SETTLED),
        "ssd_peak_ratio": ssd.peak_bytes(SETTLED) / without.peak_bytes(SETTLED),
        "peak_ratio": keep.peak_bytes(SETTLED) / none.peak_bytes(SETTLED),
        "keep_time_ratio": paired_ratio([keep], [none], SETTLED),
        "step_s": {name: one.step_time_s(SETTLED) for name, one in runs.items()},
        "peak_bytes": {name: one.peak_bytes(SETTLED) for name, one in runs.items()},
    }


def table(result: dict[str, Any]) -> str:
    """A row for each model."""
    columns = ("bytes_ratio", "step_time_ratio", "ssd_peak_ratio", "peak_ratio", "keep_time_ratio")
    rows = [
        (
            name,
            "identical" if one["identical"] else "DIFFERENT",
            *(f"{one[c]:.3f}" for c in columns),
        )
        for name, one in result.items()
    ]
    header = ("model", "bits", "moved", "step, ssd", "peak, ssd", "peak, keep", "step, keep")
    return tabulate(rows, headers=header, disable_numparse=True)


def table_of_the_rest(result: dict[str, Any], most: int = 4) -> list[tuple[str, ...]]:
    """A row for each model: what is not computed again, by the operations that made most of it.

    Args:
        result: by model, as `figures` returns it.
        most: operations with a name; the others are summed up.

    Returns:
        The model, the share that is computed again, and the rest in words.
    """
    rows = []
    for name, one in result.items():
        rest = one["unreplayed_bytes"]
        total = one["replayed_bytes"] + sum(rest.values())
        largest = sorted(rest.items(), key=lambda pair: (-pair[1], pair[0]))
        words = [f"{maker} {100 * size / total:.0f} %" for maker, size in largest[:most]]
        others = sum(size for _, size in largest[most:])
        if 200 * others >= total:  # else it is 0 %
            words.append(f"others {100 * others / total:.0f} %")
        rows.append((name, f"{100 * one['replayed_bytes'] / total:.0f} %", ", ".join(words)))
    return rows


REST_HEADER = ("model", "computed again", "saved, by what made it")


def arguments(description: str, models: str, dtypes: str) -> argparse.ArgumentParser:
    """What is measured, how large it is, and where it goes.

    Args:
        description: of the program.
        models, dtypes: by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--models", default=models, help=default)
    parser.add_argument("--dtypes", default=dtypes, help=default)
    parser.add_argument("--turns", type=int, default=7, help=f"steps that count; {default}")
    parser.add_argument("--layers", type=int, default=12, help=default)
    parser.add_argument("--hidden", type=int, default=768, help=default)
    parser.add_argument("--sequence", type=int, default=512, help=default)
    parser.add_argument("--batch", type=int, default=2, help=default)
    parser.add_argument("--vocabulary", type=int, default=8192, help=default)
    parser.add_argument("--min-bytes", default="1MiB", help=f"smaller storages stay; {default}")
    parser.add_argument("--write-limit", help="of the SSD, for example 150MB/s")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help=default)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def measured(
    tool: str, args: argparse.Namespace, measure: Callable[[str, str, Path, Any], Any]
) -> dict[str, Any]:
    """What a function finds for each model and type, with the machine; written as it comes.

    Args:
        tool: the program's name.
        args: of `arguments`, with models and types as lists.
        measure: gets a model, a type, a directory and a progress bar.

    Raises:
        RunError: a training failed.
    """
    args.directory.mkdir(parents=True, exist_ok=True)
    work = ROOT / "runs" / f"{tool}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    command = shlex.join([f"tools/bench/{tool}.py", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    result: dict[str, Any] = {"machine": machine_facts(args.directory), "command": command}
    result["models"] = {}
    print(in_a_line(result["machine"]))
    num_turns = args.turns * len(args.models) * len(args.dtypes)
    with tqdm(total=num_turns, unit="turn", disable=None) as bar:
        for model in args.models:
            for dtype in args.dtypes:
                name = f"{model} {dtype}"
                result["models"][name] = measure(model, dtype, work / name, bar)
                if args.json is not None:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    """Measures; the exit code."""
    parser = arguments(__doc__, ",".join(MODELS), ",".join(DTYPES))
    args = parser.parse_args()
    args.models, args.dtypes = args.models.split(","), args.dtypes.split(",")
    if unknown := {*args.models} - {*MODELS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; of {', '.join(MODELS)}")
    found = ways(allocator(), args.write_limit, args.min_bytes)
    try:
        result = measured(
            "replay",
            args,
            lambda model, dtype, folder, bar: figures(
                trained_in_turns(args, model, dtype, found, folder, bar)
            ),
        )
    except RunError as error:
        print(f"replay: error: {error}", file=sys.stderr)
        return 2
    print(table(result["models"]))
    print("\nof the bytes that autograd saves in a step:")
    print(tabulate(table_of_the_rest(result["models"]), headers=REST_HEADER, disable_numparse=True))
    return 0 if all(one["identical"] for one in result["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
