# SPDX-License-Identifier: Apache-2.0
"""The timeline of a training: layers, recomputation and transfers, and the same bits with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import assert_same_bits, train, train_once
from tests.unit.test_trace import check_nesting, tracks


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssd", "auto"])
def test_a_training_is_traced_and_its_results_are_the_same(mode: str, tmp_path: Path) -> None:
    flags = "--train-iters 4"
    offload = f"--activation-offload {mode} --activation-offload-dir {tmp_path}"
    if mode == "ssd":
        offload += " --activation-recompute-layers 2"
    offload += " --activation-offload-min-bytes 1KiB"
    file = tmp_path / "trace.json"
    plain = train_once(flags)
    traced = train(flags, f"{offload} --activation-offload-trace {file}", model="settled")
    assert_same_bits(traced, plain, num_steps=4)
    shown = tracks(json.loads(file.read_text()))
    for spans in shown.values():
        check_nesting(spans)
    names = [one["name"] for one in shown["compute"]]
    assert [name for name in names if name.startswith("step")] == [f"step {n}" for n in range(1, 5)]
    for name in ("forward micro-batch 0", "decoder.1", "decoder.1 backward", "decoder.2 backward"):
        assert names.count(name) >= 4, name
    assert ("recompute" in names) is (mode == "ssd")
    assert shown["write ssd"] and shown["read ssd"]
    if mode == "auto":
        assert {"attention", "mlp", "mlp backward"} <= set(names), "layers have parts"
