# SPDX-License-Identifier: Apache-2.0
"""Every model in every layout with every placement: the same bits as with offload off.

    pytest tests/megatron/test_matrix.py                       # a few cells
    pytest tests/megatron/test_matrix.py --full-matrix --matrix-table docs/results/matrix.md

A cell is a model, a layout and a precision. Its losses, gradient norms and final weights after five
steps with dropout are compared between `off` and every placement. A placement counts only if the
run's own counters show that it did what it says. The table has a line for every cell, also for
those that megatron-core cannot run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import pytest
import torch
from tabulate import tabulate

from tests.support.launch import TINY, Outcome, nothing_leaks, run_trainer
from tests.support.offload_flags import flags_of

STEPS = 5
TIMEOUT_S = 120.0
LLAMA = (
    " --swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention"
    " --num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights"
)
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "TP1": (1, ""),
    "TP2": (2, TP2),
    "TP2+SP": (2, f"{TP2} --sequence-parallel"),
    "PP2": (2, PP2),
    "PP2xVPP2": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "TP2xPP2": (4, f"{TP2} {PP2}"),
    "DP2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}
MODELS = ("GPT gelu", "GPT llama-like", "BERT", "T5")
PRECISIONS = {"fp32": "", "bf16": "--bf16"}
PLACEMENTS = ("recompute", "inputs", "full", "ssd", "host", "tiered", "mixed")
RECOMPUTED = ("recompute", "inputs", "full", "mixed")


class Cell(NamedTuple):
    """One model in one layout and precision."""

    model: str
    layout: str
    precision: str

    def __str__(self) -> str:
        return "-".join(self)


CELLS = [Cell(*cell) for cell in itertools.product(MODELS, LAYOUTS, PRECISIONS)]
QUICK = {
    Cell("GPT llama-like", "TP2xPP2", "bf16"): ("mixed",),
    Cell("GPT gelu", "PP2xVPP2", "fp32"): ("recompute", "full"),
    Cell("BERT", "PP2", "bf16"): ("tiered",),
    Cell("T5", "TP2+SP", "fp32"): ("mixed", "full"),
    Cell("T5", "DP2", "bf16"): ("host",),
    Cell("T5", "TP2xPP2", "fp32"): (),
}


def why_not(cell: Cell) -> str | None:
    """What the trainer says of a cell that megatron-core cannot run; None of all others."""
    if cell.model == "T5" and "PP" in cell.layout:
        return "megatron-core has no pipeline parallelism for T5"
    return None


def complaint(placement: str, outcome: Outcome) -> str:
    """Which counter of the first rank does not show the placement; empty if all do."""
    steps: list[dict[str, Any]] = outcome.values("offload")

    def values(name: str) -> list[Any]:
        return [step[name] for step in steps]

    written = [sum(values(name)) > 0 for name in ("host_written_bytes", "written_bytes")]
    expected = {"host": [True, False], "ssd": [False, True]}.get(placement, written)
    if placement in ("inputs", "full"):  # so few that each may be needed before it is written
        expected = [False, written[1]]
    shown = {
        "recomputed_layers": all(
            (number > 0) is (placement in RECOMPUTED) for number in values("recomputed_layers")
        ),
        "offloaded_bytes": all(
            (number > 0) is (placement != "recompute") for number in values("offloaded_bytes")
        ),
        "tier_used_bytes": nothing_leaks(steps),
        "host_written_bytes": written[0] == expected[0],
        "written_bytes": written[1] == expected[1] and (placement != "tiered" or any(written)),
    }
    return "; ".join(f"{name} {values(name)}" for name, is_shown in shown.items() if not is_shown)


class Table:
    """What came out of each cell; written anew after each, so that an interrupted run leaves it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._outcomes: dict[Cell, dict[str, str]] = {}
        self._seconds: dict[Cell, float] = {}

    def add(self, cell: Cell, outcomes: dict[str, str], seconds: float) -> str:
        """Takes a cell's outcomes by placement; returns a line about the progress."""
        self._outcomes[cell], self._seconds[cell] = outcomes, seconds
        if self._path is not None:
            self._path.write_text(self.text())
        done, spent = len(self._outcomes), sum(self._seconds.values())
        left = spent / done * (len(CELLS) - done) / 60
        found = ", ".join(f"{name} {outcome}" for name, outcome in outcomes.items())
        return f"[{done}/{len(CELLS)}] {cell}: {found}; {seconds:.0f} s, {left:.0f} min left"

    def text(self) -> str:
        """A line for every cell, whether it ran or not."""
        columns = ("off", *PLACEMENTS)
        rows = [
            (*cell, *(self._outcomes.get(cell, {}).get(name, "not run") for name in columns))
            for cell in CELLS
        ]
        outcomes = [outcome for row in rows for outcome in row[len(Cell._fields) + 1 :]]
        counts = [
            f"{sum(outcome.startswith(start) for outcome in outcomes)} {start}"
            for start in (SAME, FAILED, REFUSED, "not run")
        ]
        table = tabulate(rows, headers=(*Cell._fields, *columns), tablefmt="github")
        return f"{_HEADING}{', '.join(counts)}.\n\n{table}\n"


SAME, FAILED, REFUSED = "same bits", "FAILED", "refused"
_HEADING = f"""\
# Every model in every layout with every placement

    .venv/bin/python -m pytest tests/megatron/test_matrix.py --full-matrix \\
        --matrix-table docs/results/matrix.md

torch {torch.__version__}, megatron-core {megatron.core.__version__}, CPU with gloo; {STEPS} steps
of a tiny model with dropout. `same bits`: every loss and gradient norm and the final weights equal
those of `off`, and the counters show the placement. `refused`: the trainer ends with that sentence
and exit code 2. `inputs`: all layers recomputed, from inputs on the SSD; `full`: the same by
Megatron's `--recompute-granularity full`. `mixed`: some layers recomputed, the last one kept, the
others tiered. `DP2`: with the distributed optimizer and overlapped reduction and gathering.
`llama-like`: SwiGLU, RMSNorm, rotary positions, two query groups, no biases, an output layer of its
own.

"""


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Table:
    """Where the cells' outcomes go."""
    return Table(request.config.getoption("--matrix-table"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cells, or a few."""
    if "cell" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full-matrix")
        metafunc.parametrize("cell", CELLS if is_full else list(QUICK), ids=str)


def outcome_of(placement: str, outcome: Outcome, off: Outcome) -> str:
    """In a few words, whether a run did what it should and equals that with offload off."""
    if set(outcome.exit_codes) != {0}:
        return f"{FAILED}: exit codes {outcome.exit_codes}"
    for name in ("loss", "grad_norm"):
        if outcome.values(name) != off.values(name):
            return f"{FAILED}: another {name}"
    if outcome.model != off.model:
        return f"{FAILED}: other weights"
    missing = complaint(placement, outcome)
    return f"{FAILED}: {missing}" if missing else SAME


def outcomes_of(cell: Cell, placements: Sequence[str], tiny: str, tmp_path: Path) -> dict[str, str]:
    """Runs a cell with offload off and with each placement."""
    world_size, layout = LAYOUTS[cell.layout]
    name = cell.model.split()[0].lower()
    num_layers = 2 if name == "t5" else 4
    flags = f"{layout} {PRECISIONS[cell.precision]} --train-iters {STEPS}"
    if cell.model == "GPT llama-like":
        flags += LLAMA

    def run(offload: str) -> Outcome:
        return run_trainer(
            tiny, flags, offload, model=name, world_size=world_size, timeout_s=TIMEOUT_S
        )

    off = run("")
    reason = why_not(cell)
    if reason is not None:
        refused = off.exit_codes[0] == 2 and reason in off.errors
        outcome = REFUSED if refused else f"{FAILED}: not refused, {off.exit_codes}"
        return {"off": f"{outcome}: {reason}", **dict.fromkeys(PLACEMENTS, outcome)}
    if set(off.exit_codes) != {0} or len(off.metrics) != STEPS:
        return dict.fromkeys(("off", *PLACEMENTS), f"{FAILED}: off gave {off.exit_codes}")
    outcomes = {"off": "trains"}
    for placement in placements:
        try:
            outcome = run(flags_of(placement, tmp_path, num_layers))
            outcomes[placement] = outcome_of(placement, outcome, off)
        except TimeoutError:
            outcomes[placement] = f"{FAILED}: longer than {TIMEOUT_S} s"
        if os.listdir(tmp_path):
            outcomes[placement] = f"{FAILED}: files are left"
    return outcomes


@pytest.mark.slow(but="T5-TP2xPP2-fp32")
def test_every_placement_gives_the_same_bits(
    cell: Cell,
    table: Table,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_full = request.config.getoption("--full-matrix")
    name = cell.model.split()[0].lower()
    tiny = TINY if name == "gpt" else request.getfixturevalue("tiny")[name]
    placements = PLACEMENTS if is_full else QUICK[cell]
    begin = time.monotonic()
    outcomes = outcomes_of(cell, placements, tiny, tmp_path)
    progress = table.add(cell, outcomes, time.monotonic() - begin)
    if is_full:
        with capsys.disabled():
            print(f"\n{progress}", flush=True)
    assert outcomes.keys() == {"off", *(PLACEMENTS if why_not(cell) else placements)}
    assert [out for out in outcomes.values() if out.startswith(FAILED)] == [], outcomes


def test_the_table_has_a_line_for_every_cell_and_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "matrix.md"
    table = Table(path)
    table.add(CELLS[0], {"off": "trains", "ssd": SAME, "host": f"{FAILED}: another loss"}, 1.0)
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(CELLS) == len(MODELS) * len(LAYOUTS) * len(PRECISIONS)
    assert "another loss" in lines[0] and lines[0].count("not run") == len(PLACEMENTS) - 2
    assert all(line.count("not run") == 1 + len(PLACEMENTS) for line in lines[1:])
    number = len(CELLS) * len(PLACEMENTS)
    assert f"1 same bits, 1 FAILED, 0 refused, {number - 2} not run." in text


def test_what_differs_is_a_failure_that_says_how() -> None:
    def outcome(exit_code: int = 0, loss: float = 1.0, model: str = "a", **step: int) -> Outcome:
        counters = {"recomputed_layers": 0, "offloaded_bytes": 1, "tier_used_bytes": 0}
        counters |= {"host_written_bytes": 0, "written_bytes": 1, "forwarded_bytes": 0, **step}
        record = {"loss": loss, "grad_norm": 1.0, "model": model, "offload": counters}
        return Outcome([exit_code], "", "", [record])

    off = outcome()
    assert outcome_of("ssd", off, off) == SAME
    assert outcome_of("ssd", outcome(1), off) == "FAILED: exit codes [1]"
    assert outcome_of("ssd", outcome(loss=2.0), off) == "FAILED: another loss"
    assert outcome_of("ssd", outcome(model="b"), off) == "FAILED: other weights"
    for placement, step, counter in (
        ("recompute", {"recomputed_layers": 1}, "offloaded_bytes [1]"),
        ("mixed", {}, "recomputed_layers [0]"),
        ("host", {}, "host_written_bytes [0]; written_bytes [1]"),
        ("ssd", {"recomputed_layers": 1}, "recomputed_layers [1]"),
        ("full", {}, "recomputed_layers [0]"),
        ("inputs", {"recomputed_layers": 1, "offloaded_bytes": 0}, "offloaded_bytes [0]"),
        ("inputs", {"recomputed_layers": 1, "host_written_bytes": 1}, "host_written_bytes [1]"),
        ("ssd", {"offloaded_bytes": 0}, "offloaded_bytes [0]"),
        ("ssd", {"tier_used_bytes": 1}, "tier_used_bytes [1]"),
        ("tiered", {"written_bytes": 0}, "written_bytes [0]"),
    ):
        assert outcome_of(placement, outcome(**step), off) == f"FAILED: {counter}"


@pytest.mark.parametrize(
    ("used", "forwarded", "passes"),
    [
        ([0, 0], [0, 0], True),
        ([0, 1], [0, 1], True),  # its use overtook a write
        ([0, 5], [0, 1], False),  # so much was not overtaken
        ([1, 0], [0, 1], False),  # nothing was overtaken in that step
        ([1, 1], [1, 1], False),  # it stays
    ],
)
def test_only_a_write_that_its_use_has_overtaken_may_outlive_a_step(
    used: list[int], forwarded: list[int], passes: bool
) -> None:
    steps = [
        {"tier_used_bytes": one, "forwarded_bytes": other}
        for one, other in zip(used, forwarded, strict=True)
    ]
    assert nothing_leaks(steps) is passes
