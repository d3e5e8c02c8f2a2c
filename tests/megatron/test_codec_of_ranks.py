# SPDX-License-Identifier: Apache-2.0
"""A codec where ranks share a model: all come to the same bits, wherever the bytes were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import assert_same_bits, train, train_once
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "codec_ranks.py"


@pytest.mark.slow
def test_weights_that_ranks_both_have_stay_the_same(tmp_path: Path) -> None:
    """Else norms of tensor-parallel ranks drift apart, and no sentence says so."""
    one, other = run_ranks(SCRIPT, tmp_path, str(tmp_path))
    ends: dict[str, Any] = {}
    for codec in ("off", "int8", "int4"):
        assert one[codec]["first"] == other[codec]["first"]
        assert one[codec]["last"] == other[codec]["last"], codec
        assert one[codec]["last"] != one[codec]["first"]
        assert (one[codec]["encoded_bytes"] > 0) is (codec != "off")
        ends[codec] = one[codec]["last"][1]
    assert one["off"]["first"][0] > 8 and len(set(ends.values())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "int4"),
        ("--pipeline-model-parallel-size 2", "int8"),
        pytest.param("", "int4", marks=pytest.mark.rare),
    ],
    ids=["TP2+SP-int4", "PP2-int8", "DP2-int4"],
)
def test_a_training_ends_with_the_same_bits_wherever_bytes_were(
    layout: str, codec: str, tmp_path: Path
) -> None:
    """A slow drive leaves most in memory, and backward gets that decoded all the same."""
    layout += " --train-iters 8"
    shared = f"{layout} --activation-codec {codec} --activation-offload-min-bytes 1KiB"
    slow = f"--activation-offload ssd --activation-offload-dir {tmp_path}"
    slow += " --activation-offload-write-limit 1MB/s"
    kept = train(shared, "--activation-offload keep", world_size=2)
    moved = train(shared, slow, world_size=2)
    exact = train_once(layout, world_size=2)
    assert_same_bits(kept, moved, len(kept.metrics))
    assert moved.metrics[0]["loss"] == exact.metrics[0]["loss"]
    assert moved.model != exact.model
