# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers' models are recomputed with the cache that these have by default."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations
from tests.support.same_training import Batch, train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.text_models import HIDDEN, LAYERS, WORDS, llama, text_batches  # noqa: E402

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_IDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART = {
    **_IDS,
    "decoder_start_token_id": 1,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
}
# Where several threads add gradients, as in DeepSeek-V3's experts, no run equals another.
pytestmark = pytest.mark.usefixtures("one_compute_thread")

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}


# By what their caches are: keys and values, windows of them, states of convolutions and of linear
# attention, several in one layer, shared by layers, of an encoder and a decoder.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("ForCausalLM", _SIZES),
    "Mistral": ("ForCausalLM", {**_SIZES, "sliding_window": 16}),
    "Mixtral": ("ForCausalLM", {**_SIZES, "num_local_experts": 4}),
    "GptOss": ("ForCausalLM", {**_SIZES, "num_local_experts": 4, "head_dim": 16}),
    "Qwen3Next": (
        "ForCausalLM",
        {
            **_SIZES,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "DeepseekV3": (
        "ForCausalLM",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "Jamba": (
        "ForCausalLM",
        {
            **_SIZES,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "FalconH1": (
        "ForCausalLM",
        {**_SIZES, **_MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 8, "head_dim": 16},
    ),
    "MiniMax": ("ForCausalLM", {**_SIZES, "num_local_experts": 2, "head_dim": 16, "block_size": 8}),
    "RecurrentGemma": (
        "ForCausalLM",
        {
            **_SIZES,
            "lru_width": HIDDEN,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "Bloom": ("ForCausalLM", {"vocab_size": WORDS, "hidden_size": HIDDEN, "n_head": 4}),
    "LongT5": (
        "ForConditionalGeneration",
        {
            **_IDS,
            "decoder_start_token_id": 1,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "local_radius": 8,
        },
    ),
    "Bart": ("ForConditionalGeneration", _BART),
    "Whisper": (
        "ForConditionalGeneration",
        {
            **_BART,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}


def made(family: str) -> torch.nn.Module:
    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, family + kind)(config)  # type: ignore[no-any-return]


def padded_batches(family: str) -> list[Batch]:
    """Two, each with a row that ends early."""
    found = []
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, WORDS, (2, 32), generator=draw)
        if family == "Whisper":
            found.append({"input_features": torch.randn(2, 16, 64, generator=draw)})
        else:
            mask = torch.ones_like(tokens)
            mask[0, 24:] = 0
            found.append({"input_ids": tokens, "attention_mask": mask})
        found[-1]["labels"] = tokens
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_find_the_cache_as_it_was(family: str, tmp_path: Path) -> None:
    lengths: list[int] = []

    def call(model: Any, batch: Batch) -> torch.Tensor:
        outputs = model(**batch)
        cache = getattr(outputs, "past_key_values", None)
        caches.append((outputs, cache))
        return outputs.loss  # type: ignore[no-any-return]

    def trained(directory: Path | None = None, **settings: Any) -> Any:
        found = train(
            lambda: made(family), padded_batches(family), directory, call=call, **settings
        )
        lengths.append(_length(caches[-1][1]))
        return found

    caches: list[Any] = []
    found = trained(tmp_path, recompute_layers="all")
    assert found == trained()
    assert lengths[0] == lengths[1]  # after backward
    with offload_activations(made(family), tmp_path) as offload:
        num_layers = len(offload.layers)
    assert [one["recomputed_layers"] for one in found.statistics] == [num_layers] * 2


def _length(cache: Any) -> int:
    return int(cache.get_seq_length()) if cache is not None else 0


@pytest.mark.slow
def test_auto_recomputes_layers_with_a_cache(tmp_path: Path) -> None:
    """A disk that is far too slow: the plan is to recompute."""
    settings = {"mode": "auto", "max_slowdown": "3", "write_bytes_per_s": "2MB/s"}
    batches = text_batches(num_steps=8)
    found = train(llama, batches, tmp_path, inflight_bytes="1MiB", **settings)
    assert found == train(llama, batches)
    assert found.statistics[-1]["recomputed_layers"] > 0


def test_keys_and_values_of_a_cache_that_the_script_drops_are_not_kept(tmp_path: Path) -> None:
    model: Any = llama()
    kept: list[weakref.ref[torch.Tensor]] = []
    (batch,) = text_batches(num_steps=1)
    with offload_activations(model, tmp_path, recompute_layers="all"):
        outputs = model(**batch)
        kept += [weakref.ref(one.keys) for one in outputs.past_key_values.layers]
        loss = outputs.loss
        del outputs
        assert [one() for one in kept] == [None] * LAYERS
        loss.backward()


@pytest.mark.parametrize("holds", [True, False])
def test_a_cache_that_is_given_is_used_and_filled_once(holds: bool, tmp_path: Path) -> None:
    """Two forward passes with one cache, and one backward pass."""

    def call(model: Any, batch: Batch) -> torch.Tensor:
        tokens = batch["input_ids"]
        first = model(input_ids=tokens[:, :40])
        cache = first.past_key_values
        second = model(input_ids=tokens[:, 40:], past_key_values=cache)
        assert cache.get_seq_length() == tokens.shape[1]
        loss = first.logits.square().mean() + second.logits.square().mean()
        if holds:
            caches.append(cache)
        return loss  # type: ignore[no-any-return]

    caches: list[Any] = []
    batches = text_batches(num_steps=2)
    found = train(llama, batches, tmp_path, call=call, recompute_layers="all")
    assert found == train(llama, batches, call=call)
    assert found.statistics[-1]["recomputed_layers"] == 2 * LAYERS
    assert all(one.get_seq_length() == batches[0]["input_ids"].shape[1] for one in caches)


def test_a_static_cache_is_filled_once(tmp_path: Path) -> None:
    """Its tensors are changed in place."""

    def call(model: Any, batch: Batch) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=80)
        outputs = model(**batch, past_key_values=cache)
        caches.append(cache)
        return outputs.loss  # type: ignore[no-any-return]

    caches: list[Any] = []
    batches = text_batches(num_steps=2)
    found = train(llama, batches, tmp_path, call=call, recompute_layers="all")
    expected = train(llama, batches, call=call)
    assert found == expected
    for mine, theirs in zip(caches[1].layers, caches[-1].layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert int(mine.get_seq_length()) == int(theirs.get_seq_length())


def test_prefix_tuning_recomputes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tuning = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)

    def model() -> torch.nn.Module:
        return peft.get_peft_model(llama(), tuning)  # type: ignore[no-any-return]

    batches = text_batches(num_steps=2)
    found = train(model, batches, tmp_path, recompute_layers="all")
    assert found == train(model, batches)
    # Nothing that the first layer's own arguments lead to wants a gradient, but for the cache.
    assert found.statistics[-1]["recomputed_layers"] == LAYERS - 1
