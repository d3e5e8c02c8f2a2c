# SPDX-License-Identifier: Apache-2.0
"""What peaks of a training of Megatron are made of: a file each rank, and the same bits with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.offload.activations.stats.memory_parts import (
    KEPT,
    OUTSIDE,
    RECOMPUTED,
    StepMemory,
    layer_and_part,
    load_steps,
)
from tests.support.launch import assert_same_bits, train, train_once
from tests.support.offload_flags import ssd

STEPS = 4
LOGITS_BYTES = 4 * 32 * 256  # fp32, a sequence of 32, a vocabulary of 256


def largest(step: StepMemory, part: str, phase: str) -> int:
    return max(one.parts[part] for one in step.moments if one.phase == phase)


@pytest.mark.slow
def test_layers_logits_and_what_is_recomputed_are_named_on_each_stage(tmp_path: Path) -> None:
    flags = f"--pipeline-model-parallel-size 2 --train-iters {STEPS}"
    file = tmp_path / "memory.jsonl"
    # Of each stage the first layer is recomputed, the second one stays or moves.
    lists = "--activation-recompute-layers 1,3 --activation-offload-layers 4"
    report = f"--activation-memory-report {file}"
    found = train(flags, ssd(tmp_path), lists, report, world_size=2)
    assert_same_bits(found, train_once(flags, world_size=2), STEPS)
    outside = []
    for rank, layers in ((0, {"decoder.1", "decoder.2"}), (1, {"decoder.3", "decoder.4"})):
        steps = load_steps(file.with_name(f"memory{'-rank1' if rank else ''}.jsonl"))
        assert [one.step for one in steps] == [3, 4]
        for step in steps:
            assert step.rank == rank and step.plan == step.profile == ""
            assert sum(step.peak_parts.values()) == step.peak_bytes
            named = {layer_and_part(name)[0] for name in step.peak.layers}
            assert named <= {*layers, "outside of layers"}
            places = {layer_and_part(one.where)[0] for one in step.moments}
            assert layers < places, "each layer's end is looked at"
            # A recomputed layer keeps its input, and saves in backward what it saved not before.
            assert largest(step, RECOMPUTED, "forward") == 0
            assert largest(step, RECOMPUTED, "backward") > largest(step, KEPT, "forward") // 4 > 0
        outside.append(largest(steps[0], OUTSIDE, "forward"))
    assert outside[1] >= LOGITS_BYTES, "the last stage has the loss"
