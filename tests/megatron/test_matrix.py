# SPDX-License-Identifier: Apache-2.0
"""Every model in every layout with every placement: the same bits as with offload off.

    pytest tests/megatron/test_matrix.py                       # a few cells
    pytest tests/megatron/test_matrix.py --full-matrix --matrix-table docs/results/matrix.md

A cell is a model, a layout and a precision. Its losses, gradient norms and final weights after five
steps with dropout are compared between `off` and every placement. A placement counts only if the
run's own counters show that it did what it says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launch import TINY, Outcome, train
from tabulate import tabulate

STEPS = 5
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
PLACEMENTS = ("recompute", "ssd", "host", "tiered", "mixed")


class Cell(NamedTuple):
    """One model in one layout and precision."""

    model: str
    layout: str
    precision: str

    def __str__(self) -> str:
        return "-".join(self)


CELLS = [
    Cell(*cell)
    for cell in itertools.product(MODELS, LAYOUTS, PRECISIONS)
    if not (cell[0] == "T5" and "PP" in cell[1])  # megatron-core refuses that
]
QUICK = {
    Cell("GPT llama-like", "TP2xPP2", "bf16"): ("mixed",),
    Cell("GPT gelu", "PP2xVPP2", "fp32"): ("recompute",),
    Cell("BERT", "PP2", "bf16"): ("tiered",),
    Cell("T5", "TP2+SP", "fp32"): ("mixed",),
    Cell("T5", "DP2", "bf16"): ("host",),
}


def flags_of(placement: str, directory: Path, num_layers: int) -> str:
    """Flags that place every activation of more than a kilobyte."""
    mode = {"recompute": "ssd", "mixed": "tiered"}.get(placement, placement)
    flags = f"--activation-offload {mode} --activation-offload-min-bytes 1KiB"
    if mode != "host":
        flags += f" --activation-offload-dir {directory}"
    if mode != "ssd":
        flags += " --activation-offload-host-budget " + ("1GiB" if mode == "host" else "256KiB")
    if placement == "recompute":
        flags += f" --activation-recompute-layers 1-{num_layers}"
    elif placement == "mixed":  # kept in the last layer
        flags += " --activation-recompute-layers 1 --activation-offload-layers 2"
        if num_layers > 2:
            flags += ",3"
    return flags


def assert_it_did(placement: str, outcome: Outcome) -> None:
    """Whether the counters of the first rank show the placement."""
    steps: list[dict[str, Any]] = outcome.values("offload")
    for step in steps:
        assert (step["recomputed_layers"] > 0) is (placement in ("recompute", "mixed"))
        assert (step["offloaded_bytes"] > 0) is (placement != "recompute")
        assert step["tier_used_bytes"] == 0
    written = {
        tier: sum(step[name] for step in steps) > 0
        for tier, name in (("host", "host_written_bytes"), ("ssd", "written_bytes"))
    }
    if placement in ("ssd", "host"):
        assert written == {"ssd": placement == "ssd", "host": placement == "host"}
    elif placement == "tiered":
        assert written["ssd"] or written["host"]


Results = dict[tuple[Cell, str], str]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """What came out of each cell and placement; a table of it at the end, if one is wanted."""
    found: Results = {}
    yield found
    table = request.config.getoption("--matrix-table")
    if table is not None:
        rows = [
            (*cell, *(found.get((cell, placement), "not run") for placement in PLACEMENTS))
            for cell in CELLS
        ]
        headers = ("model", "layout", "precision", *PLACEMENTS)
        table.write_text(tabulate(rows, headers=headers, tablefmt="github") + "\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cells, or a few."""
    if "cell" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full-matrix")
        metafunc.parametrize("cell", CELLS if is_full else list(QUICK), ids=str)


def test_every_placement_gives_the_same_bits(
    cell: Cell, results: Results, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_full = request.config.getoption("--full-matrix")
    world_size, layout = LAYOUTS[cell.layout]
    name = cell.model.split()[0].lower()
    tiny = TINY if name == "gpt" else request.getfixturevalue("tiny")[name]
    num_layers = 2 if name == "t5" else 4
    flags = f"{layout} {PRECISIONS[cell.precision]} --train-iters {STEPS}"
    if cell.model == "GPT llama-like":
        flags += LLAMA

    def run(offload: str) -> Outcome:
        return train(flags, offload, tiny=tiny, model=name, world_size=world_size, timeout_s=120)

    off = run("")
    assert len(off.metrics) == STEPS
    for placement in PLACEMENTS if is_full else QUICK[cell]:
        results[cell, placement] = "FAILED"
        outcome = run(flags_of(placement, tmp_path, num_layers))
        for field in ("loss", "grad_norm"):
            assert outcome.values(field) == off.values(field), (placement, field)
        assert outcome.model == off.model, placement
        assert_it_did(placement, outcome)
        assert os.listdir(tmp_path) == []
        results[cell, placement] = "same bits"
