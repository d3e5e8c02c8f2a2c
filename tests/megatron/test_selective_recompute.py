# SPDX-License-Identifier: Apache-2.0
"""Megatron's own selective recomputation together with offload, module by module.

What a module recomputes is never saved, so it is not offloaded either; the rest of the layer is.
`test_refusals.py` has the modules that the trainer cannot build.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import assert_same_bits, nothing_leaks, train
from tests.support.offload_flags import flags_of

STEPS = 3
NO_BIAS = "--disable-bias-linear"
MOE = f"--num-experts 4 --moe-aux-loss-coeff 0.02 {NO_BIAS}"
SHARED = "--moe-shared-expert-intermediate-size 64"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
# Flags of the model, ranks, modules, placements.
CASES = {
    "core_attn": ("", 1, "core_attn", ("ssd", "mixed")),
    "layernorm": ("", 1, "layernorm", ("ssd", "host", "mixed")),
    "mlp": (NO_BIAS, 1, "mlp", ("ssd", "mixed")),
    "all three, TP2+SP": (
        f"{NO_BIAS} {TP2_SP} --swiglu --normalization RMSNorm",
        2,
        "core_attn layernorm mlp",
        ("tiered", "mixed"),
    ),
    "layernorm, PP2 bf16": (
        "--pipeline-model-parallel-size 2 --bf16",
        2,
        "core_attn layernorm",
        ("ssd", "mixed"),
    ),
    "moe": (MOE, 1, "moe", ("host", "mixed")),
    "moe, EP2": (f"{MOE} --expert-model-parallel-size 2", 2, "moe layernorm", ("mixed",)),
    "shared_experts": (f"{MOE} {SHARED}", 1, "shared_experts", ("ssd", "mixed")),
}


QUICK = ("layernorm, PP2 bf16", "moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.rare) for name in CASES],
)
def test_selective_recomputation_and_offload_give_the_same_bits(case: str, tmp_path: Path) -> None:
    model, world_size, modules, placements = CASES[case]
    model += f" --train-iters {STEPS}"
    selective = f"{model} --recompute-granularity selective --recompute-modules {modules}"
    # Not all of Megatron's own recomputation is bit-identical to none: RMSNorm's is not.
    own = train(selective, world_size=world_size)
    whole = train(model, flags_of("ssd", tmp_path, 4), world_size=world_size)
    for placement in placements:
        outcome = train(
            selective, flags_of(placement, tmp_path, 4), model="settled", world_size=world_size
        )
        assert_same_bits(outcome, own, STEPS)
        assert nothing_leaks(outcome.values("offload"))
        assert outcome.values("offload")[-1]["tier_used_bytes"] == 0
        for step, without in zip(outcome.values("offload"), whole.values("offload"), strict=True):
            assert step["offloaded_bytes"] > 0
            assert (step["recomputed_layers"] > 0) is (placement == "mixed")
            # What a module recomputes is neither offloaded nor replayed. The trainer's attention
            # saves nothing but its inputs, which the recomputed one keeps too.
            if modules != "core_attn" and placement != "mixed":
                here, whole_bytes = (
                    one["offloaded_bytes"] + one["replayed_bytes"] for one in (step, without)
                )
                assert here < whole_bytes
