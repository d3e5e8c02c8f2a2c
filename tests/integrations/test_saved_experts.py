# SPDX-License-Identifier: Apache-2.0
"""Frozen models whose parameters transformers joins of several tensors of their files: experts."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_parameters
from megatron.offload.parameters.filed_unit import FiledUnit
from megatron.offload.parameters.weight_files import WeightFiles
from tests.support.frozen import VOCABULARY, assert_same, round_matrices, train, with_adapters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
loading = pytest.importorskip("transformers.core_model_loading", reason="from version 5 on")
safetensors = pytest.importorskip("safetensors.torch")

ATTENTION = ("q_proj", "v_proj")
FAMILIES = ("mixtral", "qwen3_moe")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}


def config(family: str) -> Any:
    if family == "mixtral":
        return transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=11)
    return transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=48, num_experts=11, head_dim=8
    )


def model_of(settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models, in several files, with tensors of single experts."""
    found = {}
    for family in FAMILIES:
        path = found[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(1)
        model_of(config(family)).save_pretrained(path, max_shard_size="300KB")
        names = WeightFiles(path).names
        assert len(list(path.glob("*.safetensors"))) > 1
        assert sum(".experts.10." in name for name in names) == 3 * SIZES["num_hidden_layers"]
        assert not any(name.endswith("gate_up_proj") for name in names)
    return found


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def without_memory(folder: Path) -> Any:
    settings = transformers.AutoConfig.from_pretrained(folder)
    with accelerate.init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=settings.dtype)


MADE = {"in memory": in_memory, "without memory": without_memory}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("codec", ["off", "int8", "nf4"])
@pytest.mark.parametrize("mode", ["ssd", "host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_trained_as_on_a_model_in_memory(
    folders: dict[str, Path], tmp_path: Path, family: str, mode: str, codec: str, made: str
) -> None:
    folder = folders[family]
    other = in_memory(folder).requires_grad_(False)
    if codec != "off":
        round_matrices(other.model.layers, codec)
    other = with_adapters(other, ATTENTION)
    losses = train(other)
    model = MADE[made](folder).requires_grad_(False)
    directory = tmp_path if mode == "ssd" else None
    weights = folder if made == "without memory" else None
    settings = {"mode": mode, "codec": codec, "weights": weights}
    with offload_parameters(model, directory, **settings) as offloaded:
        model = with_adapters(model, ATTENTION)
        assert train(model) == losses
        assert offloaded.statistics["read_bytes"] > 0
        assert_same(model.state_dict(), other.state_dict())
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_where_they_are_and_nothing_is_written(
    folders: dict[str, Path],
    tmp_path: Path,
    family: str,
    made: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folders[family]
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    other = with_adapters(in_memory(folder), ATTENTION)
    losses = train(other)
    model = MADE[made](folder).requires_grad_(False)
    with (
        caplog.at_level(logging.WARNING, "megatron.offload"),
        offload_parameters(model, tmp_path, weights=folder, in_place=True) as offloaded,
    ):
        assert offloaded.window is not None
        model = with_adapters(model, ATTENTION)
        assert train(model) == losses
        found = offloaded.statistics
        assert found["written_bytes"] == 0 < found["read_bytes"]
        assert found["peak_bytes"] < found["parameter_bytes"]
        assert all(isinstance(one, FiledUnit) for one in offloaded.window.units)
        assert_same(model.state_dict(), other.state_dict())
        assert train(model) == train(other)
    assert_same(model.state_dict(), other.state_dict())
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before
    assert "not read where they are" not in caplog.text


def other_experts(family: str) -> Any:
    """Settings of families with other names, and with layers of several kinds."""
    if family == "phimoe":
        return transformers.PhimoeConfig(**SIZES, intermediate_size=48, num_local_experts=4)
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **SIZES, intermediate_size=48, num_local_experts=4, head_dim=8
        )
    return transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "phimoe"])
def test_other_families_are_read_where_they_are(tmp_path: Path, family: str) -> None:
    torch.manual_seed(1)
    model_of(other_experts(family)).save_pretrained(tmp_path)
    other = in_memory(tmp_path)
    model = without_memory(tmp_path).eval().requires_grad_(False)
    tokens = torch.randint(VOCABULARY, (2, 8))
    with offload_parameters(model, mode="host", weights=tmp_path, in_place=True) as offloaded:
        assert torch.equal(model(tokens).logits, other(tokens).logits)
        assert offloaded.statistics["written_bytes"] == 0
        assert_same(model.state_dict(), other.state_dict())


def test_adapters_may_be_there_before_where_the_model_is_in_memory(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = with_adapters(in_memory(folders["mixtral"]), ATTENTION)
    model = with_adapters(in_memory(folders["mixtral"]), ATTENTION)
    settings = {"weights": folders["mixtral"], "in_place": True}
    with offload_parameters(model, tmp_path, **settings) as offloaded:
        assert train(model) == train(other)
        assert offloaded.statistics["written_bytes"] == 0


@pytest.mark.parametrize("how", ["another type", "other values"])
def test_units_that_are_not_in_the_files_are_written_once_and_a_line_says_so(
    folders: dict[str, Path], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders["mixtral"]
    other, model = in_memory(folder), in_memory(folder)
    for one in (other, model):
        if how == "another type":
            one.to(torch.bfloat16)
        else:
            with torch.no_grad():
                one.model.layers[1].mlp.experts.gate_up_proj[3, 50, 7].neg_()
        one.requires_grad_(False)
    losses = train(with_adapters(other, ATTENTION))
    with (
        caplog.at_level(logging.WARNING, "megatron.offload"),
        offload_parameters(model, tmp_path, weights=folder, in_place=True) as offloaded,
    ):
        assert offloaded.window is not None
        written = [unit.num_bytes for unit in offloaded.window.units]
        written = written if how == "another type" else written[1:2]
        for unit in offloaded.window.units:
            unit.wait_for_write()
        assert train(with_adapters(model, ATTENTION)) == losses
        assert offloaded.statistics["written_bytes"] == sum(written)
    said = [one for one in caplog.messages if "are not read where they are" in one]
    assert len(said) == 1
    assert f"{len(written)} of 3 frozen units" in said[0] and str(folder) in said[0]


def test_files_without_an_expert_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    files = WeightFiles(folders["mixtral"])
    tensors = {name: files[name].read() for name in files.names}
    del tensors["model.layers.1.block_sparse_moe.experts.4.w3.weight"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    model = without_memory(folders["mixtral"])
    with pytest.raises(ConfigurationError, match=r"gate_up_proj of the tensors in .*; give"):
        offload_parameters(model, mode="host", weights=tmp_path)
    assert all(param.is_meta for param in model.parameters())


@pytest.fixture
def turned_llama(tmp_path: Path) -> Iterator[Path]:
    """A saved model of which no matrix of an MLP is in the files as it is in memory."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    halves = loading.WeightConverter(
        "mlp.both_proj.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        [loading.Chunk(dim=0)],
    )
    turned = loading.WeightConverter(
        "mlp.turned_proj.weight", "mlp.down_proj.weight", [loading.Transpose(0, 1)]
    )
    mapping.register_checkpoint_conversion_mapping("llama", [halves, turned], overwrite=True)
    try:
        settings = transformers.LlamaConfig(
            **{**SIZES, "intermediate_size": 32, "num_experts_per_tok": None}
        )
        torch.manual_seed(1)
        model_of(settings).save_pretrained(tmp_path / "model")
        assert sum("both_proj" in one for one in WeightFiles(tmp_path / "model").names) == 3
        yield tmp_path / "model"
    finally:
        del mapping._checkpoint_conversion_mapping_cache["llama"]
        mapping.USER_REGISTERED_MAPPINGS.discard("llama")


def test_what_is_turned_or_divided_is_as_transformers_makes_it(
    turned_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its matrices are square, so a look at shapes shows nothing."""
    other = in_memory(turned_llama)
    losses = train(with_adapters(other))
    model = without_memory(turned_llama).requires_grad_(False)
    with (
        caplog.at_level(logging.WARNING, "megatron.offload"),
        offload_parameters(model, tmp_path, weights=turned_llama, in_place=True),
    ):
        assert_same(model.state_dict(), in_memory(turned_llama).state_dict())
        assert train(with_adapters(model)) == losses
    assert "3 of 3 frozen units are not read where they are" in caplog.text
