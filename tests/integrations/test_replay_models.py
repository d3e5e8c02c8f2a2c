# SPDX-License-Identifier: Apache-2.0
"""Replay with models of transformers, in every mode, as they are by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
BF16 = torch.bfloat16


def llama() -> Any:
    config = transformers.LlamaConfig(intermediate_size=160, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


def qwen3() -> Any:
    config = transformers.Qwen3Config(
        intermediate_size=160, num_key_value_heads=2, head_dim=16, **SIZES
    )
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, n_positions=32, vocab_size=96, bos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=256, **SIZES))


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        intermediate_size=96, num_key_value_heads=2, num_local_experts=4, **SIZES
    )
    return transformers.MixtralForCausalLM(config)


def olmo() -> Any:
    """Its norms have no weight, and compute in fp32."""
    return transformers.OlmoForCausalLM(
        transformers.OlmoConfig(intermediate_size=160, pad_token_id=0, **SIZES)
    )


# The most of the bytes that may still move with fp32 weights, and with bf16.
MODELS: dict[str, tuple[Callable[[], Any], float, float]] = {
    "llama": (llama, 0.62, 0.6),
    "qwen3": (qwen3, 0.6, 0.55),
    "gpt2": (gpt2, 0.42, 0.45),
    "bert": (bert, 0.56, 0.62),
    "mixtral": (mixtral, 0.75, 0.75),
    "olmo": (olmo, 0.63, 0.56),
}


def train(
    make: Callable[[], Any],
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 5,
    autocast: bool = False,
    **settings: Any,
) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    """Losses, weights and the last step's statistics, with dropout and whatever the default is."""
    torch.manual_seed(3)
    model = make().to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = offload_activations(model, min_bytes=256, **settings) if settings else None
    losses, statistics = [], {}
    for step in range(steps):
        torch.manual_seed(step)
        for length in (24, 16)[: 1 + step % 2]:  # accumulated, and of another length
            ids = torch.randint(0, 96, (2, length))
            with torch.autocast("cpu", BF16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            if handle is not None:
                statistics = handle.statistics
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return losses, [one.detach().clone() for one in model.parameters()], statistics


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_the_same_and_fewer_bytes_move(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make, *most = MODELS[name]
    plain = train(make, dtype)
    without = train(make, dtype, directory=tmp_path, mode="ssd", replay="off")
    ours = train(make, dtype, directory=tmp_path, mode="ssd")
    assert_same(without, plain)
    assert_same(ours, plain)
    ratio = ours[2]["offloaded_bytes"] / without[2]["offloaded_bytes"]
    assert ratio <= most[dtype is BF16], ratio
    spared = without[2]["offloaded_bytes"] - ours[2]["offloaded_bytes"]
    assert ours[2]["replayed_bytes"] >= spared > 0 and ours[2]["num_replays"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "keep"},
        {"mode": "host", "host_budget": 1 << 26},
        {"mode": "tiered", "host_budget": 1 << 26},
        {"mode": "ssd", "recompute_layers": "1"},
        {"mode": "ssd", "offload_layers": "1-2"},
        {"mode": "auto", "memory_budget_bytes": 1 << 23},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_goes_with_every_mode(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make = MODELS[name][0]
    ours = train(make, directory=tmp_path, **settings)
    assert_same(ours, train(make))
    if settings["mode"] != "auto":  # whose plan chooses, see test_torch_auto.py
        assert ours[2]["replayed_bytes"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_it_goes_with_autocast(name: str, tmp_path: Path) -> None:
    make = MODELS[name][0]
    ours = train(make, autocast=True, directory=tmp_path, mode="ssd")
    assert_same(ours, train(make, autocast=True))
    assert ours[2]["replayed_bytes"] > 0


def test_replay_without_offload_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="instead"):
        offload_activations(torch.nn.Linear(2, 2), mode="off", replay="on")
    with pytest.raises(ConfigurationError, match="keep moves nothing"):
        offload_activations(torch.nn.Linear(2, 2), mode="keep", replay="off")
