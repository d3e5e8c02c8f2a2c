# SPDX-License-Identifier: Apache-2.0
"""Attention or MLP of a layer recomputed alone, as a plan says: no bit changes, memory falls.

A row of `PARTS` says what becomes of a layer's attention and MLP; the layers of a model take the
rows in turn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.activations.placement.plan import Plan, PlannedPart
from megatron.offload.activations.placement.plan_file import save_plans
from megatron.offload.activations.placement.policy import Placement
from tests.support.launch import (
    TINY,
    Outcome,
    assert_same_bits,
    nothing_leaks,
    run_trainer,
    train,
    train_once,
)
from tests.support.offload_flags import auto

STEPS = 4
NUM_MICRO_BATCHES = 4
KEEP, RECOMPUTE, SSD = Placement.KEEP, Placement.RECOMPUTE, Placement.SSD
Lines = dict[str, Placement]
PARTS: tuple[Lines, ...] = (
    {"attention": RECOMPUTE, "mlp": SSD},
    {"attention": SSD, "mlp": RECOMPUTE},
    {"attention": RECOMPUTE, "mlp": RECOMPUTE},
    {"attention": KEEP, "mlp": RECOMPUTE},
)
CHEAP_PARTS: tuple[Lines, ...] = (
    {"attention": SSD, "attention-selective": RECOMPUTE, "mlp": SSD, "mlp-selective": RECOMPUTE},
    {"attention": KEEP, "attention-selective": RECOMPUTE, "mlp": KEEP, "mlp-selective": RECOMPUTE},
    {"attention": RECOMPUTE, "mlp-selective": RECOMPUTE, "mlp": SSD},
    {"attention": SSD, "mlp": KEEP, "mlp-selective": RECOMPUTE},
)
# RMSNorm is not among the selective operations.
CHEAP_MLPS = tuple(
    {name: one for name, one in lines.items() if name != "attention-selective"}
    for lines in CHEAP_PARTS
)

SWIGLU = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = {
    "gelu": ("", 1, PARTS),
    "swiglu bf16": (f"{SWIGLU} --bf16", 1, PARTS),
    "swiglu TP2+SP": (f"{SWIGLU} {TP2_SP}", 2, PARTS),
    "gelu PP2 selective": (
        "--pipeline-model-parallel-size 2 --recompute-granularity selective"
        " --recompute-modules core_attn layernorm",
        2,
        PARTS,
    ),
    "experts": (
        "--num-experts 4 --moe-aux-loss-coeff 0.02 --disable-bias-linear",
        1,
        PARTS,
    ),
    "cheap gelu": ("", 1, CHEAP_PARTS),
    "cheap gelu TP2+SP bf16": (f"{TP2_SP} --bf16", 2, CHEAP_PARTS),
    "cheap swiglu": (SWIGLU, 1, CHEAP_MLPS),
    "cheap swiglu bf16": (f"{SWIGLU} --bf16", 1, CHEAP_MLPS),
    "cheap PP2": ("--pipeline-model-parallel-size 2", 2, CHEAP_PARTS),
    "cheap experts": (
        "--num-experts 4 --moe-aux-loss-coeff 0.02 --disable-bias-linear",
        1,
        CHEAP_PARTS,
    ),
}
QUICK = (
    "gelu",
    "swiglu bf16",
    "cheap gelu",
    "cheap gelu TP2+SP bf16",
    "cheap swiglu",
)


def plan_of(stage: int, layers: range, parts: tuple[Lines, ...]) -> Plan:
    """The rows of `parts` in turn."""
    parts = [
        PlannedPart(0, f"decoder.{number}", *line, 0)
        for number in layers
        for line in parts[(number - 1) % len(parts)].items()
    ]
    return Plan(tuple(parts), stage=stage)


def follow(flags: str, world_size: int, directory: Path, parts: tuple[Lines, ...]) -> Outcome:
    """A training that follows such a plan."""
    plans = [plan_of(0, range(1, 5), parts)]
    if "pipeline" in flags:
        plans = [plan_of(0, range(1, 3), parts), plan_of(1, range(3, 5), parts)]
    path = directory / "plan.json"
    save_plans(path, plans)
    plan = f"--activation-offload-plan {path}"
    return train(flags, auto(directory, plan), model="settled", world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.rare) for name in CASES],
)
def test_a_part_that_is_recomputed_alone_changes_no_bit(case: str, tmp_path: Path) -> None:
    flags, world_size, parts = CASES[case]
    flags += f" --train-iters {STEPS}"
    planned = follow(flags, world_size, tmp_path, parts)
    off = train_once(flags, world_size=world_size)
    assert_same_bits(planned, off, STEPS)
    own = parts[:2] if "pipeline" in flags else parts  # of the pipeline's first stage
    number = sum(list(lines.values()).count(RECOMPUTE) for lines in own)
    for step in planned.values("offload"):
        assert step["recomputed_parts"] == number * NUM_MICRO_BATCHES
        assert step["recomputed_layers"] == 0
        assert step["offloaded_bytes"] > 0
    assert nothing_leaks(planned.values("offload"))
    assert planned.values("offload")[-1]["tier_used_bytes"] == 0


@pytest.mark.slow
def test_what_a_part_recomputes_is_not_offloaded(tmp_path: Path) -> None:
    flags = f"--train-iters {STEPS}"
    moved = {}
    for attention in (KEEP, RECOMPUTE, SSD):
        for mlp in (KEEP, RECOMPUTE, SSD):
            outcome = follow(flags, 1, tmp_path, ({"attention": attention, "mlp": mlp},))
            moved[attention, mlp] = outcome.metrics[-1]["offload"]["offloaded_bytes"]
    # A part moves what it moves, whatever becomes of the other.
    assert moved[KEEP, KEEP] == moved[RECOMPUTE, KEEP] == moved[KEEP, RECOMPUTE] == 0
    assert moved[RECOMPUTE, RECOMPUTE] == 0
    assert moved[SSD, RECOMPUTE] == moved[SSD, KEEP] > 0
    assert moved[RECOMPUTE, SSD] == moved[KEEP, SSD] > 0
    assert moved[SSD, SSD] == moved[SSD, KEEP] + moved[KEEP, SSD]


@pytest.mark.slow
def test_what_selective_operations_give_is_not_offloaded(tmp_path: Path) -> None:
    # Replay would compute them again as well.
    flags = f"--train-iters {STEPS} --activation-replay off"
    elements = 4 * 32  # four bytes, a sequence of 32
    everything: Lines = {"attention": SSD, "mlp": SSD}
    moved = {}
    for selective in ((), ("attention-selective",), ("mlp-selective",)):
        lines = {**everything, **dict.fromkeys(selective, RECOMPUTE)}
        outcome = follow(flags, 1, tmp_path, (lines,))
        moved[selective] = outcome.metrics[-1]["offload"]["offloaded_bytes"]
    less = {selective[0]: moved[()] - moved[selective] for selective in moved if selective}
    # Norms' results, of 64 elements for each token; the activation function's, of 256.
    each = {"attention-selective": 64 * elements, "mlp-selective": (64 + 256) * elements}
    assert less == {name: 4 * NUM_MICRO_BATCHES * size for name, size in each.items()}


@pytest.mark.parametrize(
    ("flags", "part", "sentence"),
    [
        ("--normalization RMSNorm", "attention-selective", "which that layer does not allow"),
        (
            "--disable-bias-linear --recompute-granularity selective --recompute-modules mlp",
            "mlp-selective",
            "recomputes mlp-selective of decoder.1 alone, which that layer does not allow",
        ),
    ],
)
def test_what_a_layer_cannot_recompute_alone_is_refused(
    flags: str, part: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    lines = {"attention": KEEP, "mlp": KEEP, part: RECOMPUTE}
    save_plans(path, [plan_of(0, range(1, 5), (lines,))])
    outcome = run_trainer(TINY, flags, auto(tmp_path, f"--activation-offload-plan {path}"))
    assert outcome.exit_codes == [2] and outcome.metrics == []
    (line,) = (line for line in outcome.errors.splitlines() if "error:" in line)
    assert sentence in line


def test_a_group_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = plan_of(0, range(1, 5), PARTS)
    save_plans(path, [plan])
    path.write_text(path.read_text().replace('"mlp"', '"mpl"'))
    outcome = run_trainer(TINY, auto(tmp_path, f"--activation-offload-plan {path}"))
    assert outcome.exit_codes == [2] and outcome.metrics == []
    (line,) = (line for line in outcome.errors.splitlines() if "error:" in line)
    assert "the plan has a part 'mpl' of decoder.1; expected one of attention, mlp" in line
