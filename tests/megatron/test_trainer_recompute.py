# SPDX-License-Identifier: Apache-2.0
"""Recomputed activations equal kept ones: losses, gradient norms and weights, bit by bit."""

from __future__ import annotations

import pytest

from tests.support.launch import Outcome, train


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-granularity selective --recompute-modules core_attn layernorm",
    ],
    ids=["full-uniform", "full-block", "selective"],
)
def test_recompute_is_bit_identical_with_dropout(one_process: Outcome, flags: str) -> None:
    outcome = train(flags, "--train-iters 4")
    for name in ("loss", "grad_norm"):
        assert outcome.values(name) == one_process.values(name), name
    assert outcome.model == one_process.model
