#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Trains again and again on the test accelerator, with random delays, also with wrong waits.

    python tests/ordering.py [--runs 100] [--wrong-runs 10] [--only WORDS] [--json FILE]

`tests/support/ordering_stress.py` says what is trained with activations on tiers,
`states_stress.py` what with optimizer states there, `layer_major_stress.py` what in layer-major
steps with hidden states, or parameters and gradients, there, `ordering_mistakes.py` what can be
wrong. A run has new delays and one of the modes, in turn; with a mistake one of those in which that
shows. Loss and gradients, or weights and states, are compared with those without offload, bit by
bit. Each mistake has a process of its own, since it may end it. About 20 minutes.

It shows that work is done in the right order. It shows nothing of a GPU's driver.

Exit code: 0 no right run differs and every mistake is found in 9 of 10 runs; 1 that does not hold;
2 the test accelerator cannot be used here.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Not this directory: its folder `megatron` must not become part of the package of that name.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

from megatron.offload.commands.training_runs.machine import machine_facts  # noqa: E402
from tests.support.lag import load  # noqa: E402
from tests.support.lag.build import build, why_not  # noqa: E402
from tests.support.layer_major_stress import (  # noqa: E402
    LAYER_MAJOR_MODES,
    LayerMajorStress,
)
from tests.support.ordering_mistakes import MISTAKES, Mistake, made  # noqa: E402
from tests.support.ordering_stress import MODES, OrderingStress, Outcome  # noqa: E402
from tests.support.states_stress import STATES_MODES, StatesStress  # noqa: E402

Stress = OrderingStress | StatesStress | LayerMajorStress
LEAST_FOUND = 0.9  # of the runs with a mistake
_ALONE = "no offload"
_ALLOWED_S = 60.0  # for all runs with a mistake; those that are left then count as hanging
_MODES_OF: dict[type[Stress], list[str]] = {
    OrderingStress: list(MODES),
    StatesStress: list(STATES_MODES),
    LayerMajorStress: list(LAYER_MAJOR_MODES),
}
_STRESS_OF = {mode: stress for stress, modes in _MODES_OF.items() for mode in modes}
_HANGS, _ENDED = "it hangs", "the process ended"


@dataclass
class Found:
    """What the runs with one mistake showed, or those without in one mode."""

    what: str
    runs: int = 0
    found: int = 0
    by: dict[str, int] = field(default_factory=dict)
    modes: str = ""
    offloaded_bytes: int = 0
    forwarded_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """Counts a run."""
        self.runs += 1
        self.offloaded_bytes += outcome.offloaded_bytes
        self.forwarded_bytes += outcome.forwarded_bytes
        if outcome.found:
            self.found += 1
            by = kind_of(outcome.found)
            self.by[by] = self.by.get(by, 0) + 1


def kind_of(found: str) -> str:
    """How a run showed that something was wrong: `poison`, `wrong bits`, or the kind of error."""
    before, _, _ = found.partition(" in step" if " in step" in found else ":")
    return before


def right_runs(num_runs: int, first_seed: int) -> list[Found]:
    """Runs of the model without offload, and of every mode; nothing may be found."""
    rows = {name: Found(name) for name in (_ALONE, *_STRESS_OF)}
    with tempfile.TemporaryDirectory() as directory:
        stresses = [kind(load(), Path(directory)) for kind in _MODES_OF]
        alone = next(one for one in stresses if isinstance(one, OrderingStress))
        for seed in range(first_seed, first_seed + num_runs):
            rows[_ALONE].add(alone.run_without_offload(seed))
            for one, modes in zip(stresses, _MODES_OF.values(), strict=True):
                mode = modes[seed % len(modes)]
                outcome = one.run(mode, seed)
                rows[mode].add(outcome)
                if outcome.found:
                    print(f"{mode}, seed {seed}: {outcome.found}", flush=True)
    return list(rows.values())


def wrong_runs(mistake: Mistake, num_runs: int, first_seed: int) -> Found:
    """Runs with a mistake, in processes of their own."""
    row = Found(mistake.what, modes="; ".join(mistake.modes))
    while row.runs < num_runs:
        numbers = [str(first_seed + row.runs), str(num_runs - row.runs)]
        command = [sys.executable, __file__, "--mistake", mistake.what, *numbers]
        ended = _HANGS
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, timeout=_ALLOWED_S, check=False
            )
            output, ended = done.stdout, f"{_ENDED}, exit code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout or b""
        for line in output.decode().splitlines():
            row.add(Outcome(**json.loads(line)))
        if row.runs < num_runs:
            if ended.endswith(" 1"):
                raise RuntimeError(f"{mistake.what}: the runs could not be made")
            row.add(Outcome(ended))  # the run that it was in
    return row


def run_mistake(what: str, first_seed: int, num_runs: int) -> None:
    """In a process of its own: prints the outcome of each run."""
    mistake = next(one for one in MISTAKES if one.what == what)
    with tempfile.TemporaryDirectory() as directory:
        stress = _STRESS_OF[mistake.modes[0]](load(), Path(directory))
        with made(mistake):
            for seed in range(first_seed, first_seed + num_runs):
                mode = mistake.modes[seed % len(mistake.modes)]
                print(json.dumps(asdict(stress.run(mode, seed))), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it all, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100, help="right runs")
    parser.add_argument("--wrong-runs", type=int, default=10, help="runs of each mistake")
    parser.add_argument("--only", default="", metavar="WORDS", help="mistakes that contain this")
    parser.add_argument("--seed", type=int, default=0, help="of the first run, then one more each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--mistake", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"the test accelerator cannot be used here: {reason}", file=sys.stderr)
        return 2
    logging.disable()  # budgets are used up, and so on
    torch.set_num_threads(1)  # kernels of several streams have a core each
    if given.mistake:
        what, first_seed, num_runs = given.mistake
        run_mistake(what, int(first_seed), int(num_runs))
        return 0
    build()
    right = right_runs(given.runs, given.seed) if given.runs else []
    if right:
        print(table_of_right(right), flush=True)
    wrong = []
    for mistake in MISTAKES if given.wrong_runs else ():
        if given.only in mistake.what:
            wrong.append(wrong_runs(mistake, given.wrong_runs, given.seed))
            print(f"{wrong[-1].found} of {wrong[-1].runs}: {mistake.what}", flush=True)
    if wrong:
        print(table_of_wrong(wrong))
    passed = not any(row.found for row in right) and not any(map(missed, wrong))
    print("PASS" if passed else "FAIL")
    if given.json:
        machine = machine_facts(Path(tempfile.gettempdir()))
        report: dict[str, Any] = {"passed": passed, "machine": machine, "seed": given.seed}
        report |= {"right": [asdict(row) for row in right], "wrong": [asdict(row) for row in wrong]}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


def missed(row: Found) -> bool:
    """Whether a mistake was found too seldom."""
    return row.found < LEAST_FOUND * row.runs


def table_of_right(rows: Sequence[Found]) -> str:
    """What right runs showed, as markdown."""
    headers = ["right runs", "runs", "that differ", "offloaded a step", "of it forwarded"]
    return tabulate(
        [
            [
                row.what,
                row.runs,
                row.found,
                "" if row.what == _ALONE else f"{row.offloaded_bytes / row.runs / 1e6:.1f} MB",
                "" if row.what == _ALONE else f"{row.forwarded_bytes / row.offloaded_bytes:.0%}",
            ]
            for row in rows
            if row.runs
        ],
        headers,
        tablefmt="pipe",
    )


def table_of_wrong(rows: Sequence[Found]) -> str:
    """What runs with mistakes showed, as markdown."""
    return tabulate(
        [
            [
                f"{row.what}{' (MISSED)' if missed(row) else ''}",
                f"{row.found} of {row.runs}",
                ", ".join(f"{by} {n}" for by, n in collections.Counter(row.by).most_common()),
            ]
            for row in rows
        ],
        ["mistake", "found in runs", "by"],
        tablefmt="pipe",
    )


if __name__ == "__main__":
    sys.exit(main())
