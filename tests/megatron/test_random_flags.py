# SPDX-License-Identifier: Apache-2.0
"""Flags that were drawn: trainings with many of the trainer's flags and of ours at once.

The other tests choose what they combine. A seed stands for what it has once drawn: to draw more,
give `SEEDS` other numbers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.launch import assert_same_bits, train
from tests.support.offload_flags import ssd

STEPS = 3
SEEDS = (1, 2, 3, 4)
LAYOUTS = {
    "": 1,
    "--tensor-model-parallel-size 2": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--use-distributed-optimizer": 2,
    "--use-distributed-optimizer --overlap-grad-reduce": 2,
}
ANY = (
    "--swiglu",
    "--bf16",
    "--normalization RMSNorm",
    "--position-embedding-type rope --rotary-percent 0.5",
    "--group-query-attention --num-query-groups 2",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--attention-dropout 0",
    "--accumulate-allreduce-grads-in-fp32",
    "--recompute-granularity selective",
    "--ddp-bucket-size 20000",
    "--eval-interval 2 --eval-iters 1",
)
OURS = (
    "--activation-replay off",
    "--activation-offload-granularity part",
    "--activation-recompute-layers 1-2 --activation-recompute-input ssd",
    "--activation-offload-verify checksum",
    "--activation-offload-inflight 64KiB",
    "--optimizer-state-offload ssd --optimizer-state-bucket 16KiB --optimizer-state-window 0B",
    "--optimizer-state-offload host --optimizer-step-on cpu",
    "--parameter-offload ssd",
    "--layer-major-units auto --layer-major-order ascending",
)


def drawn(seed: int) -> tuple[int, str, str]:
    """Number of ranks, the trainer's flags, and ours."""
    draw = random.Random(seed)
    layout = draw.choice(list(LAYOUTS))
    flags = [layout, *draw.sample(ANY, 5)]
    return LAYOUTS[layout], " ".join(flags), " ".join(draw.sample(OURS, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_flags_change_no_bit(seed: int, tmp_path: Path) -> None:
    world_size, flags, ours = drawn(seed)
    flags += f" --train-iters {STEPS}"
    off = train(flags, world_size=world_size)
    moved = train(flags, ssd(tmp_path), ours, world_size=world_size)
    assert_same_bits(moved, off, STEPS)
    assert moved.values("offload")[-1]["offloaded_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
