# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with offload: the same bits, and nothing counted twice by recomputation.

Routers add to counters that outlive the layer: the auxiliary loss that is reported, and the tokens
of each expert that the expert bias follows. A recomputed layer's router runs twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import launch
from tests.support.launch import TINY, assert_same_bits, run_trainer, train
from tests.support.offload_flags import flags_of, ssd

STEPS = 4
MOE = f"--num-experts 4 --moe-aux-loss-coeff 0.02 --disable-bias-linear --train-iters {STEPS}"
EP2 = "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one rank": (1, "--moe-router-topk 3", ("ssd", "recompute")),
    "EP2": (2, f"{EP2} --bf16", ("tiered", "mixed")),
    "EP2 all-to-all": (2, f"{EP2} --moe-token-dispatcher-type alltoall", ("host", "recompute")),
    "EP2 distributed optimizer": (
        2,
        f"{EP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ("mixed",),
    ),
    "TP2+SP shared expert": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel"
        " --moe-shared-expert-intermediate-size 64 --swiglu",
        ("mixed",),
    ),
    "PP2xVPP2": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", ("mixed",)),
    "PP2xEP2": (4, f"{PP2} {EP2}", ("mixed",)),
}


QUICK = ("EP2",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.rare) for name in LAYOUTS],
)
def test_experts_give_the_same_bits(layout: str, tmp_path: Path) -> None:
    world_size, flags, placements = LAYOUTS[layout]
    off = train(MOE, flags, world_size=world_size)
    assert all(losses["load_balancing"] > 0 for losses in off.values("losses"))
    for placement in placements:
        outcome = train(MOE, flags, flags_of(placement, tmp_path, 4), world_size=world_size)
        assert_same_bits(outcome, off, STEPS)
        for step in outcome.values("offload"):
            assert (step["recomputed_layers"] > 0) is (placement in ("recompute", "mixed"))
            assert (step["offloaded_bytes"] > 0) is (placement != "recompute")


@pytest.mark.rare
def test_both_ways_to_the_experts_train_the_same_model() -> None:
    one, two = (
        train(MOE, EP2, f"--moe-token-dispatcher-type {name}", world_size=2)
        for name in ("allgather", "alltoall")
    )
    assert_same_bits(one, two, STEPS)


def test_a_mixture_is_balanced_by_its_auxiliary_loss() -> None:
    """The reported loss is that of one pass: 1 if all experts get as many tokens, 4 if one does."""
    outcome = train(MOE, "--moe-aux-loss-coeff 1.0")
    assert all(0.99 < losses["load_balancing"] < 1.5 for losses in outcome.values("losses"))


_COUNTING_SCRIPT = """\
from trainer import model
from trainer.gpt import GPT
from trainer.training import pretrain


class BiasedGPT(GPT):
    def transformer_config(self, args):
        config = super().transformer_config(args)
        config.moe_router_enable_expert_bias = True
        config.moe_router_score_function = "sigmoid"
        return config


def finalize(chunks, *args, finalize=model.finalize_model_grads, **kwargs):
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if hasattr(module, "local_tokens_per_expert"):
                print("COUNTED", name, module.local_tokens_per_expert.tolist(), flush=True)
    finalize(chunks, *args, **kwargs)
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "local_tokens_per_expert"):
                module.local_tokens_per_expert.zero_()


model.finalize_model_grads = finalize
pretrain(BiasedGPT())
"""


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [pytest.param("1-4", marks=pytest.mark.rare), "2"])
def test_tokens_of_an_expert_are_counted_once(
    recomputed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(_COUNTING_SCRIPT)
    directory = tmp_path / "offload"
    directory.mkdir()
    monkeypatch.setitem(launch.SCRIPTS, "counting", script)

    def counted(offload: str) -> list[str]:
        outcome = run_trainer(TINY, MOE, offload, model="counting")
        assert outcome.exit_codes == [0], outcome.output
        return [line for line in outcome.output.splitlines() if line.startswith("COUNTED ")]

    off = counted("")
    assert len(off) == 4 * STEPS
    for line in off:
        numbers = line.partition("[")[2].rstrip("]").split(",")
        assert sum(map(float, numbers)) == 4 * 32 * 2  # samples, tokens, experts of a token
    assert counted(f"{ssd(directory)} --activation-recompute-layers {recomputed}") == off
