# SPDX-License-Identifier: Apache-2.0
"""A model that was made without memory and is filled from its files while its layers leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload, offload_parameters
from megatron.offload.errors import LostStateError
from megatron.offload.integration.torch import saved_values
from megatron.offload.parameters.filed_unit import FiledUnit
from megatron.offload.parameters.weight_files import SavedTensor, WeightFiles
from tests.support.frozen import VOCABULARY, assert_same, round_matrices, train, with_adapters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
save_file = pytest.importorskip("safetensors.torch").save_file


def config(*, tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, in several files."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config()).save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def in_memory(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def without_memory(*, tied: bool = False) -> Any:
    with accelerate.init_empty_weights():
        return transformers.LlamaForCausalLM(config(tied=tied))


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(peft.get_peft_model_state_dict(model))


@pytest.mark.parametrize("codec", ["off", "int8", "nf4"])
def test_adapters_are_trained_as_on_a_model_in_memory(
    folder: Path, tmp_path: Path, codec: str
) -> None:
    other = in_memory(folder)
    if codec != "off":
        other.requires_grad_(False)
        round_matrices(other.model.layers, codec)
    other = with_adapters(other)
    losses = train(other)
    model = without_memory().requires_grad_(False)
    with offload_parameters(model, tmp_path, weights=folder, codec=codec) as offloaded:
        assert offloaded.window is not None
        for unit in offloaded.window.units:
            unit.wait_for_write()  # else it is taken back when it is needed, and written again
        model = with_adapters(model)
        assert train(model) == losses
        assert offloaded.statistics["written_bytes"] == offloaded.statistics["moved_bytes"]
        assert_same(adapters_of(model), adapters_of(other))
        assert_same(model.state_dict(), other.state_dict())
    assert_same(model.state_dict(), other.state_dict())


def test_all_parameters_are_trained(folder: Path, tmp_path: Path) -> None:
    other = in_memory(folder)
    losses = train(other)
    model = without_memory()
    with offload(model, None, tmp_path, parameters={"weights": folder}, activations=False):
        assert train(model) == losses
        assert_same(model.state_dict(), other.state_dict())


def test_hooks_of_a_script_see_the_gradients_of_what_is_filled(
    folder: Path, tmp_path: Path
) -> None:
    def hooked(model: Any) -> list[torch.Size]:
        seen: list[torch.Size] = []
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 0.5)
            removed.append(param.register_hook(lambda grad: grad * 0.0))
            param.register_post_accumulate_grad_hook(lambda one: seen.append(one.shape))
        return seen

    removed: list[Any] = []
    other, model = in_memory(folder), without_memory()
    of_other, of_model = hooked(other), hooked(model)
    with offload_parameters(model, tmp_path, weights=folder):
        for handle in removed:
            handle.remove()
        assert train(model) == train(other)
        assert len(of_model) == len(of_other) > 0
        assert_same(model.state_dict(), other.state_dict())


def test_one_file_and_ties(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(config(tied=True))
    other.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert file.exists()
    model = without_memory(tied=True)
    model.tie_weights()
    with offload_parameters(model, tmp_path, weights=file):
        assert train(model) == train(other)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_same(model.state_dict(), other.state_dict())


def test_other_types_are_converted(folder: Path) -> None:
    expected = in_memory(folder).to(torch.bfloat16).state_dict()
    model = without_memory().to(torch.bfloat16)
    with offload_parameters(model, mode="host", weights=folder):
        assert_same(model.state_dict(), expected)


def test_off_fills_the_model_in_memory(folder: Path) -> None:
    model = without_memory()
    offload_parameters(model, mode="off", weights=folder)
    assert_same(model.state_dict(), in_memory(folder).state_dict())


class Whole(torch.nn.Module):
    """Layers with all kinds of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)) for _ in range(3)
        )
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(16.0), persistent=False)
        self.layers[0][0].weight.mark = "kept"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.table


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Whole, Path]:
    """A model whose buffers are not those that it is made with, and its file."""
    model = Whole()
    model.scale.fill_(0.5)
    for _ in range(3):
        model(torch.randn(8, 16) * 5)
    path = tmp_path / "whole.safetensors"
    save_file(model.state_dict(), path)
    return model.eval(), path


def test_buffers_come_from_the_files_too(whole: tuple[Whole, Path], tmp_path: Path) -> None:
    other, path = whole
    with accelerate.init_empty_weights():
        model = Whole().eval()
    x = torch.randn(4, 16)
    with offload_parameters(model, tmp_path, weights=path):
        assert torch.equal(model(x), other(x))
        assert model.layers[0][0].weight.mark == "kept"
        assert_same(model.state_dict(), other.state_dict())


def test_what_failed_half_way_can_be_done_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, left = without_memory().requires_grad_(False), SavedTensor.read, [15]

    def fails(saved: SavedTensor) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise OSError(5, "Input/output error")
        return read(saved)

    monkeypatch.setattr(SavedTensor, "read", fails)
    with pytest.raises(OSError, match="Input/output error"):
        offload_parameters(model, tmp_path, weights=folder, codec="int8")
    assert all(param.is_meta for param in model.parameters())
    other = in_memory(folder)
    round_matrices(other.model.layers.requires_grad_(False), "int8")
    with offload_parameters(model, tmp_path, weights=folder, codec="int8"):
        assert_same(model.state_dict(), other.state_dict())


def test_files_of_the_model_beneath_a_head(tmp_path: Path) -> None:
    """As GPT-2's on the hub: without the name of what has the head."""
    settings = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=2)
    torch.manual_seed(1)
    other = transformers.GPT2LMHeadModel(settings).eval()
    other.transformer.save_pretrained(tmp_path / "model")
    with accelerate.init_empty_weights():
        model = transformers.GPT2LMHeadModel(settings).eval()
    model.tie_weights()
    tokens = torch.randint(VOCABULARY, (2, 8))
    with offload_parameters(model, tmp_path, weights=tmp_path / "model"):
        assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_a_whole_file_goes_before_an_index(folder: Path, tmp_path: Path) -> None:
    """As transformers has it: the model was saved again into the folder of an older one."""
    copied = shutil.copytree(folder, tmp_path / "model")
    torch.manual_seed(7)
    newer = transformers.LlamaForCausalLM(config())
    save_file(newer.state_dict(), copied / "model.safetensors")
    model = without_memory()
    with offload_parameters(model, mode="host", weights=copied):
        assert_same(model.state_dict(), newer.state_dict())


def test_types_that_no_layer_computes_in_are_named(folder: Path, tmp_path: Path) -> None:
    saved = in_memory(folder).state_dict()
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        saved["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 32).to(dtype)
        save_file(saved, tmp_path / "model.safetensors")
        refused(without_memory(), tmp_path, "in a type that its layer does not compute in")


# -- Read where they are --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ssd", "host"])
@pytest.mark.parametrize("made", ["without memory", "in memory"])
def test_layers_are_read_where_they_are_and_nothing_is_written(
    folder: Path, tmp_path: Path, mode: str, made: str
) -> None:
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    other = with_adapters(in_memory(folder))
    losses = train(other)
    model = without_memory() if made == "without memory" else in_memory(folder)
    model.requires_grad_(False)
    directory = tmp_path if mode == "ssd" else None
    settings = {"mode": mode, "weights": folder, "in_place": True}
    with offload_parameters(model, directory, **settings) as offloaded:
        assert offloaded.window is not None
        model = with_adapters(model)
        assert train(model) == losses
        found = offloaded.statistics
        assert found["written_bytes"] == 0 < found["read_bytes"]
        assert found["peak_bytes"] < found["parameter_bytes"]
        assert "the files in" in offloaded.report()
        assert_same(model.state_dict(), other.state_dict())  # shown from a copy
        assert train(model) == train(other)
    assert_same(model.state_dict(), other.state_dict())
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before


@pytest.mark.parametrize("how", ["in place", "through data", "replaced", "trained"])
def test_what_is_changed_is_written_and_the_files_stay(
    folder: Path, tmp_path: Path, how: str
) -> None:
    before = {one.name: one.read_bytes() for one in folder.iterdir()}

    def change(model: Any) -> None:
        weight = model.model.layers[1].mlp.up_proj.weight
        new = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
        if how == "in place":
            with torch.no_grad():
                weight.copy_(new)
        elif how == "through data":
            weight.data.copy_(new)
        elif how == "replaced":
            weight.data = new
        else:
            weight.requires_grad_(True)

    other, model = in_memory(folder), without_memory()
    for one in (other, model):
        one.requires_grad_(False)
        one.lm_head.requires_grad_(True)
    with offload_parameters(model, tmp_path, weights=folder, in_place=True):
        for one in (other, model):
            change(one)
        assert train(model) == train(other)
        assert_same(model.state_dict(), other.state_dict())
        assert train(model) == train(other)
    assert_same(model.state_dict(), other.state_dict())
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before


def test_a_file_that_changes_meanwhile_ends_the_training(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    model = without_memory().requires_grad_(False)
    offloaded = offload_parameters(model, tmp_path, weights=copied, in_place=True)
    model = with_adapters(model)
    train(model)
    for one in copied.glob("*.safetensors"):
        one.write_bytes(one.read_bytes())
    with pytest.raises(LostStateError, match="has changed since it was opened") as lost:
        train(model)
    assert "put the saved model's files back as they were and resume" in str(lost.value)
    offloaded.close(restore=False)


def test_what_is_changed_behind_files_that_have_changed_is_written(
    folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    other, model = in_memory(folder), without_memory().requires_grad_(False)
    settings = {"weights": copied, "in_place": True, "live_units": 4}  # all are in memory
    with offload_parameters(model, tmp_path, **settings) as offloaded:
        tokens = torch.randint(VOCABULARY, (2, 8))
        model(tokens)
        for one in copied.glob("*.safetensors"):
            one.write_bytes(one.read_bytes())
        with torch.no_grad():
            for layer in (*model.model.layers, *other.model.layers):
                layer.mlp.up_proj.weight.mul_(2)
        assert torch.equal(model(tokens).logits, other(tokens).logits)
        assert_same(model.state_dict(), other.state_dict())
        assert offloaded.window is not None
        assert offloaded.window.units


def test_layers_that_are_trained_or_of_another_type_are_written(
    folder: Path, tmp_path: Path
) -> None:
    other, model = in_memory(folder), without_memory()
    for one in (other, model):
        one.requires_grad_(False)
        one.model.layers[2].requires_grad_(True)
    model.model.layers[0].mlp.to(torch.float64).to(torch.float32)  # again on the meta device
    with offload_parameters(model, tmp_path, weights=folder, in_place=True) as offloaded:
        assert offloaded.window is not None
        kinds = [isinstance(unit, FiledUnit) for unit in offloaded.window.units]
        assert kinds == [True, True, False, True]
        assert train(model) == train(other)
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"codec": "int8"}, "give one of the two"),
        ({"weights": None}, "say where with weights="),
        ({"trained": True}, "frozen as a whole, and none is"),
    ],
)
def test_what_in_place_does_not_go_with(
    folder: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    model = in_memory(folder).requires_grad_(settings.pop("trained", False))
    settings = {"weights": folder, **settings}
    with pytest.raises(ConfigurationError, match=words):
        offload_parameters(model, tmp_path, in_place=True, **settings)


# -- What cannot work -----------------------------------------------------------------------------


def refused(model: Any, folder: Path, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as raised:
        offload_parameters(model, mode="host", weights=folder)
    assert "; " in str(raised.value)


def test_a_model_in_memory_has_nothing_to_fill(folder: Path) -> None:
    refused(in_memory(folder), folder, "this model has none")


def test_a_model_without_memory_needs_files() -> None:
    with pytest.raises(ConfigurationError, match="has no values; give weights="):
        offload_parameters(without_memory(), mode="host")


def test_buffers_have_to_be_in_memory(folder: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config())
    refused(model, folder, "the buffer .* is on the meta device")


def test_adapters_come_after(folder: Path) -> None:
    refused(with_adapters(without_memory()), folder, "add adapters after offload_parameters")


def test_the_folder_of_another_model(folder: Path, tmp_path: Path) -> None:
    other = config()
    other.intermediate_size = 48
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(other)
    refused(model, folder, r"has shape \[48, 32\], and in .* \[64, 32\]")
    refused(without_memory(), tmp_path, "has no \\*.safetensors")
    with pytest.raises(OSError, match="No such file"):
        offload_parameters(without_memory(), mode="host", weights=tmp_path / "nothing")


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "one.safetensors"
    path.write_bytes(sorted(folder.glob("*.safetensors"))[0].read_bytes())
    yield path


def test_a_damaged_file_is_said_to_be_one(file: Path) -> None:
    whole = file.read_bytes()
    for number in range(200):  # in the header's length and its beginning
        for changed in (0, 0xFF):
            data = bytearray(whole)
            data[number] = changed
            file.write_bytes(bytes(data))
            try:
                WeightFiles(file)
            except ConfigurationError as error:
                assert "is no safetensors file" in str(error)
    for length in (0, 3, 8, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="is no safetensors file"):
            WeightFiles(file)


def test_a_damaged_index_is_said_to_be_one(folder: Path, tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', json.dumps({})):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigurationError, match="is no index of safetensors files"):
            WeightFiles(tmp_path)


def test_a_file_that_is_cut_short_meanwhile_is_an_error_and_leaves_nothing_open(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(folder, tmp_path / "model")
    real = saved_values.WeightFiles

    def then_cut(path: Path, base: str) -> Any:
        found = real(path, base)
        last = sorted(path.glob("*.safetensors"))[-1]
        last.write_bytes(last.read_bytes()[:-100])
        return found

    monkeypatch.setattr(saved_values, "WeightFiles", then_cut)
    directory = tmp_path / "offload"
    directory.mkdir()
    with pytest.raises(OSError, match="was cut short at byte"):
        offload_parameters(without_memory(), directory, weights=copied)
    assert not list(directory.iterdir())
