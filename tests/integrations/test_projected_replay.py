# SPDX-License-Identifier: Apache-2.0
"""Projected bytes of an eager layer are those that a Llama of transformers moves and replays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.offload import offload_activations
from megatron.offload.planner.projection.hardware import DriveSpec, GpuSpec, Hardware
from megatron.offload.planner.projection.model import Parallelism, Transformer
from megatron.offload.planner.projection.projection import Projection, project

transformers = pytest.importorskip("transformers")

MIN_BYTES = 1024
HIDDEN, FFN, HEADS, TOKENS = 64, 160, 4, 32
FIGURES = ("offloaded_bytes", "replayed_bytes", "offloaded_storages")


def of_a_layer(directory: Path, dtype: torch.dtype, replay: str) -> list[int]:
    """What a step of a model with a layer more has more."""
    found = []
    for num_layers in (2, 3):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=num_layers,
            num_attention_heads=HEADS,
            vocab_size=96,
        )
        model = transformers.LlamaForCausalLM(config).to(dtype)
        with offload_activations(model, directory, replay=replay, min_bytes=MIN_BYTES) as handle:
            for _ in range(2):
                ids = torch.randint(0, 96, (1, TOKENS))
                model(input_ids=ids, labels=ids).loss.backward()
            found.append([handle.statistics[name] for name in FIGURES])
    return [more - fewer for fewer, more in zip(*found, strict=True)]


@pytest.mark.parametrize("replay", ["off", "on"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_a_layer_of_llama_is_projected_byte_by_byte(
    tmp_path: Path, dtype: torch.dtype, name: str, replay: str
) -> None:
    model = Transformer(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=TOKENS,
        ffn_hidden_size=FFN,
        gated=True,
        rope=True,
        rms_norm=True,
        dtype=name,
        eager=True,
    )
    hardware = Hardware(GpuSpec.load("a100"), DriveSpec.load("990-pro"))
    [layer] = project(
        Projection(model, Parallelism(), hardware, min_bytes=MIN_BYTES, replay=replay == "on")
    ).layers
    assert of_a_layer(tmp_path, dtype, replay) == [
        layer.movable_bytes,
        layer.replayed_bytes,
        sum(part.num_storages for part in layer.parts),
    ]
