#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether a run that is killed because its optimizer states are in memory trains with them on SSD.

    tools/check/states_in_a_cgroup.py --json result.json        # about a minute on 2 cores
    tools/check/states_in_a_cgroup.py --parameters --layers 130 --steps 2       # about 5 minutes
    tools/check/states_in_a_cgroup.py --gradients --layers 80 --steps 2         # about 3 minutes

The same training three times, each in a process of its own: with states in memory and as much of it
as there is; in a control group with less, by --less of the states' bytes; and there with states on
the SSD. It needs root, or a control group in which others may be made.

With --parameters those are on the SSD too, steps are layer-major with four micro-batches, and the
group has a third of what weights, gradients and states take. Gradients stay in memory: a quarter.
With --gradients these leave as well, and the group has an eighth.

Exit code: 0 in the group the run with states in memory was killed for memory, the one with states
on the SSD ended, and all that ended have the same weights, bit for bit; 1 one of these does not
hold; 2 no such group can be made, or a training failed otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]

from check.memory_group import CheckError, PeakMemory, memory_group, run_in_group  # noqa: E402
from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from megatron.offload.errors import ConfigurationError  # noqa: E402
from megatron.offload.sizes import MIB, format_size, parse_size  # noqa: E402

IN_MEMORY, ON_SSD = "memory", "ssd"
_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        states: where they were.
        limit_bytes: of its control group; None: none.
        killed: it was, because the group's memory was used up.
        peak_bytes: most memory that was its own at a time; 0: it was killed.
        step_s: the median of its steps; 0: it was killed.
        weights: a digest of their bits at the end; empty: it was killed.
    """

    states: str
    limit_bytes: int | None
    killed: bool
    peak_bytes: int = 0
    step_s: float = 0.0
    weights: str = ""


# -- The training ---------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Trains in this process and prints its result as JSON."""
    import torch

    from megatron.offload import LayerMajor, offload_optimizer, offload_parameters
    from megatron.offload.integration.open_parameters import changing

    linear = [torch.nn.Linear(args.hidden, args.hidden, device="meta") for _ in range(args.layers)]
    moves = ON_SSD if args.states == ON_SSD and args.parameters else "off"
    for layer in linear:
        for name, param in layer.named_parameters():
            # What is to be on the SSD takes no memory until it is filled, layer by layer.
            made = (
                torch.zeros(()).expand(param.shape)
                if moves == ON_SSD
                else torch.zeros_like(param, device="cpu")
            )
            setattr(layer, name, torch.nn.Parameter(made))
    model = torch.nn.Sequential(*linear)
    leave = "on" if args.gradients and moves == ON_SSD else "off"
    offload_parameters(model, args.dir, mode=moves, layers=[torch.nn.Linear], gradients=leave)
    torch.manual_seed(1)
    for layer in linear:
        with changing(list(layer.parameters())):
            layer.reset_parameters()
    layer_major = LayerMajor(model, layers=[torch.nn.Linear]) if args.parameters else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    offload_optimizer(
        optimizer,
        args.dir,
        mode=ON_SSD if args.states == ON_SSD else "off",
        window_bytes=args.window,
        bucket_bytes=args.window // 4,
    )
    steps_s = []
    with PeakMemory() as memory:
        for _ in range(args.steps):
            began = time.perf_counter()
            inputs = torch.randn(_MICRO_BATCHES, 8, args.hidden)
            if layer_major is not None:
                layer_major.step(inputs.unbind(), lambda one: model(one).square().mean())
            else:
                model(inputs[0]).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps_s.append(time.perf_counter() - began)
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().data)
    result = {
        "peak_bytes": memory.peak_bytes,
        "step_s": median(steps_s),
        "weights": digest.hexdigest()[:16],
    }
    print(json.dumps(result))


def run(states: str, limit_bytes: int | None, args: argparse.Namespace) -> Run:
    """Trains in a process of its own.

    Raises:
        CheckError: it failed otherwise than for memory.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--train", "--states", states]
    for name in ("hidden", "layers", "steps", "window", "dir"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--parameters"] if args.parameters else []
    command += ["--gradients"] if args.gradients else []
    try:
        found = run_in_group(command, limit_bytes)
    except CheckError as error:
        raise CheckError(f"states in {states}: {error}") from None
    return Run(states, limit_bytes, killed=found is None, **(found or {}))


# -- The verdict ----------------------------------------------------------------------------------


def all_runs(args: argparse.Namespace) -> list[Run]:
    """Without a limit, then both with one that states in memory do not fit."""
    free = run(IN_MEMORY, None, args)
    limit_bytes = int(free.peak_bytes - args.less * 8 * num_parameters(args))
    if args.parameters:
        limit_bytes = 16 * num_parameters(args) // (8 if args.gradients else 3)
    return [free, *(run(states, limit_bytes, args) for states in (IN_MEMORY, ON_SSD))]


def num_parameters(args: argparse.Namespace) -> int:
    """Of the model that is trained."""
    return int(args.layers * (args.hidden + 1) * args.hidden)


def holds(runs: Sequence[Run]) -> bool:
    """Whether the limit ends the run with states in memory and no other, and no bit differs."""
    killed = [(one.states, one.limit_bytes is not None) for one in runs if one.killed]
    weights = {one.weights for one in runs if not one.killed}
    return killed == [(IN_MEMORY, True)] and len(weights) == 1


def table(runs: Sequence[Run]) -> str:
    """A row for each run."""
    rows = [
        [
            one.states,
            "none" if one.limit_bytes is None else format_size(one.limit_bytes),
            "killed for memory" if one.killed else "trained",
            "" if one.killed else format_size(one.peak_bytes),
            "" if one.killed else f"{one.step_s:.2f}",
            one.weights,
        ]
        for one in runs
    ]
    heads = ["states in", "limit", "end", "peak memory", "step (s)", "weights"]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains three times, prints the table and the verdict; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the layers (2048)")
    parser.add_argument("--layers", type=int, default=24, help="(24)")
    parser.add_argument("--steps", type=int, default=5, help="of each training (5)")
    parser.add_argument("--window", type=_size, default=64 * MIB, help="of states (64MiB)")
    parser.add_argument(
        "--less", type=float, default=0.4, help="memory, as a part of the states' bytes (0.4)"
    )
    parser.add_argument("--parameters", action="store_true", help="these are on the SSD as well")
    parser.add_argument("--gradients", action="store_true", help="and gradients")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "offload", help="on the SSD")
    # Of one training, not for people.
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--states", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parameters = args.parameters or args.gradients
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.train:
        train(args)
        return 0
    try:
        with memory_group(1 << 40):  # whether one can be made, before minutes are spent
            pass
        runs = all_runs(args)
    except (CheckError, subprocess.TimeoutExpired) as error:
        print(f"states_in_a_cgroup.py: error: {error}", file=sys.stderr)
        return 2
    num_params = num_parameters(args)
    verdict = "holds" if holds(runs) else "DOES NOT HOLD"
    print(f"{num_params / 1e6:.0f} M parameters in fp32, AdamW, window {format_size(args.window)}")
    print(f"\n{table(runs)}\n\n{verdict}: with states on the SSD it trains where it was killed")
    if args.json is not None:
        values = {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["tools/check/states_in_a_cgroup.py", *(argv or sys.argv[1:])]),
            "machine": machine_facts(args.dir),
            "holds": holds(runs),
            "parameters": num_params,
            "runs": [asdict(one) for one in runs],
        }
        args.json.write_text(json.dumps(values, indent=1).replace(f"{ROOT}/", "") + "\n")
    return 0 if holds(runs) else 1


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
