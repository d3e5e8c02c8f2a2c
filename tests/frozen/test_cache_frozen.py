# SPDX-License-Identifier: Apache-2.0
"""`cache_frozen`: the same bits as without, and hits where the same inputs come again."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, OffloadError, cache_frozen, offload_parameters
from megatron.offload.integration.torch.skipped import SkippedTensor
from tests.support.frozen_training import BATCH, TOKENS, Batch, hits_of, llama, rows_of_text, train
from tests.support.full_disk import one_warning_about

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def one_batch() -> Batch:
    return {name: one[:BATCH] for name, one in rows_of_text().items()}


def changed(batch: Batch, name: str, row: int, column: int) -> Batch:
    """The batch with another value in one place."""
    value = batch[name].clone()
    value[row, column] ^= 1
    return batch | {name: value}


# -- The same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_prefix_trains_the_same(
    tmp_path: Path, shuffled: bool, dtype: torch.dtype
) -> None:
    rows = rows_of_text()
    kept = train(llama().to(dtype), rows, None, shuffled=shuffled)
    cached = train(llama().to(dtype), rows, tmp_path, shuffled=shuffled)
    assert cached.same_as(kept)
    assert cached.hits == [0, 2 * BATCH]
    again = train(llama().to(dtype), rows, tmp_path, shuffled=shuffled)
    assert again.same_as(kept)
    assert again.hits == [2 * BATCH, 2 * BATCH]  # from its first step on


@pytest.mark.parametrize(("tokens", "batch"), [(5, 2), (17, 3), (37, 5), (50, 7)])
def test_rows_have_the_same_bits_in_every_place(tmp_path: Path, tokens: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 64, (4 * batch, tokens), generator=generator)
    rows = {"input_ids": ids, "labels": ids}
    kept = train(llama(), rows, None, batch=batch, epochs=3)
    cached = train(llama(), rows, tmp_path, batch=batch, epochs=3)
    assert cached.same_as(kept)


def test_autocast_has_keys_of_its_own(tmp_path: Path) -> None:
    rows = rows_of_text()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            kept = train(llama(), rows, None)
            cached = train(llama(), rows, tmp_path)
        assert cached.same_as(kept) and cached.hits == [0, 2 * BATCH]


class TwoTowers(torch.nn.Module):
    """A frozen vision tower in front of trained layers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            **settings,
        )
        self.vision = transformers.ViTModel(config, add_pooling_layer=False)
        self.vision.requires_grad_(False)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.head(self.vision(pixel_values, **kwargs).last_hidden_state).square().mean()


def pixels(num_rows: int = 2 * BATCH) -> Batch:
    return {"pixel_values": torch.randn(num_rows, 3, 16, 16, generator=torch.Generator())}


def test_a_vision_tower_trains_the_same(tmp_path: Path) -> None:
    rows = pixels()
    kept = train(TwoTowers(), rows, None, loss_of=lambda loss: loss)
    cached = train(TwoTowers(), rows, tmp_path, loss_of=lambda loss: loss)
    assert cached.same_as(kept)
    assert cached.hits == [0, 2 * BATCH]


def test_a_text_encoder_trains_the_same(tmp_path: Path) -> None:
    """T5's layers hand on more than hidden states, and it has dropout."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
        )
        encoder = transformers.T5EncoderModel(config).requires_grad_(False)
        return torch.nn.ModuleDict({"encoder": encoder, "head": torch.nn.Linear(32, 4)})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = make()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            text = self.parts["encoder"](input_ids=input_ids, attention_mask=attention_mask)
            return self.parts["head"](text.last_hidden_state).square().mean()

    rows = rows_of_text()
    del rows["labels"]
    kept = train(Model(), rows, None, loss_of=lambda loss: loss)
    cached = train(Model(), rows, tmp_path, loss_of=lambda loss: loss)
    assert cached.same_as(kept)
    assert cached.hits == [0, 2 * BATCH]


def test_a_reference_model_gives_the_same_logits(tmp_path: Path) -> None:
    batch = one_batch()
    model = llama(frozen=4).requires_grad_(False).eval()
    with torch.no_grad():
        wanted = model(**batch).logits
        with cache_frozen(model, tmp_path) as features:
            for _ in range(2):
                assert torch.equal(model(**batch).logits, wanted)
                features.store.wait_for_writes()
            assert features.statistics["hit_rows"] == BATCH


def test_layers_of_a_sequential_are_a_prefix(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 2))
        for one in layers:
            one.requires_grad_(False)
        return model

    rows = {"input": torch.randn(6, 8)}
    kept = train(make(), rows, None, loss_of=torch.sum)
    cached = train(make(), rows, tmp_path, loss_of=torch.sum)
    assert cached.same_as(kept) and cached.hits == [0, 6]


# -- A miss ----------------------------------------------------------------------------------------


def _in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[0, 0] += 1


def _behind_torch(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(1.5)  # counted nowhere


def _replaced(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.5


@pytest.mark.parametrize("change", [_in_place, _behind_torch, _replaced])
def test_a_changed_weight_is_a_miss(
    tmp_path: Path, change: Callable[[torch.nn.Parameter], None]
) -> None:
    batch = one_batch()
    model = llama()
    weight = model.model.layers[1].mlp.up_proj.weight
    with cache_frozen(model, tmp_path) as features:
        for _ in range(2):
            model(**batch)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] == BATCH
        change(weight)
        loss = model(**batch).loss
        assert features.statistics["hit_rows"] == BATCH
    assert torch.equal(loss, model(**batch).loss)
    assert hits_of(model, [batch], tmp_path) == [BATCH]  # in another run too
    assert hits_of(llama(), [batch], tmp_path) == [BATCH]
    other = llama()
    _in_place(other.model.layers[0].self_attn.q_proj.weight)
    assert hits_of(other, [batch], tmp_path) == [0]


def test_a_changed_token_or_mask_is_a_miss(tmp_path: Path) -> None:
    batch = one_batch()
    others = [changed(batch, "input_ids", 0, 3), changed(batch, "attention_mask", 2, TOKENS - 1)]
    assert hits_of(llama(), [batch, batch, *others], tmp_path) == [0, BATCH, 0, 0]


def test_changed_positions_are_a_miss(tmp_path: Path) -> None:
    batch = one_batch()
    positions = torch.arange(TOKENS).repeat(BATCH, 1)
    later = positions.clone()
    later[1] += 1
    batches = [batch | {"position_ids": one} for one in (positions, positions, later, later)]
    assert hits_of(llama(), batches, tmp_path) == [0, BATCH, 0, BATCH]


def test_a_changed_pixel_is_a_miss(tmp_path: Path) -> None:
    batch = pixels(BATCH)
    other = {"pixel_values": batch["pixel_values"].clone()}
    other["pixel_values"][1, 2, 15, 15] += 1e-6
    assert hits_of(TwoTowers(), [batch, batch, other], tmp_path) == [0, BATCH, 0]


def test_other_shapes_and_settings_are_a_miss(tmp_path: Path) -> None:
    """They take other kernels, whose bits may differ."""
    batch = one_batch()
    assert hits_of(llama(), [batch, batch], tmp_path) == [0, BATCH]
    shorter = {name: one[:, :-1] for name, one in batch.items()}
    smaller = {name: one[:-1] for name, one in batch.items()}
    assert hits_of(llama(), [shorter, smaller], tmp_path) == [0, 0]
    assert hits_of(llama().eval(), [batch], tmp_path) == [0]
    assert hits_of(llama(attn_implementation="eager"), [batch], tmp_path) == [0]
    with torch.autocast("cpu", torch.bfloat16):
        assert hits_of(llama(), [batch], tmp_path) == [0]
    with torch.no_grad():
        assert hits_of(llama(), [batch], tmp_path) == [0]
    assert hits_of(llama(), [batch], tmp_path) == [BATCH]


@pytest.mark.parametrize(
    "change", [{"stride": (2, 2)}, {"padding_mode": "circular"}], ids=["stride", "padding"]
)
def test_another_attribute_of_a_module_is_a_miss(tmp_path: Path, change: dict[str, Any]) -> None:
    """Of the same weights and inputs."""

    def make(**settings: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        tower = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.ReLU())
        for name, value in settings.items():
            setattr(tower[0], name, value)
        if "padding_mode" in settings:
            tower[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]
        return torch.nn.Sequential(tower.requires_grad_(False), torch.nn.Conv2d(2, 1, 1))

    batch = {"input": torch.randn(4, 1, 6, 6)}
    assert hits_of(make(), [batch, batch], tmp_path) == [0, 4]
    assert hits_of(make(**change), [batch], tmp_path) == [0]
    assert hits_of(make(), [batch], tmp_path) == [4]


class Shifted(torch.nn.Module):
    """Adds numbers of a list, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.numbers, self.more = [1.0, 2.0], 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + sum(self.numbers) + self.more


@pytest.mark.parametrize("change", ["list in place", "number", "another"])
def test_attributes_that_change_between_passes_are_a_miss(tmp_path: Path, change: str) -> None:
    """Of a part that was looked at before."""
    shifted = Shifted().requires_grad_(False)
    if change != "list in place":
        vars(shifted)["numbers"] = (1.0, 2.0)
    model, x = torch.nn.Sequential(shifted, torch.nn.Linear(4, 2)), torch.randn(3, 4)
    hits = []
    with cache_frozen(model, tmp_path) as features:
        for number in range(4):
            if number == 2:
                if change == "list in place":
                    shifted.numbers[1] = 7.0
                else:
                    vars(shifted)["more" if change == "number" else "another"] = 1.0
            expected = model[1](x * shifted.weight + sum(shifted.numbers) + shifted.more)
            assert torch.equal(model(x), expected)
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    assert hits == [0, 3, 3, 6]


def test_weights_that_a_pass_changes_out_of_sight_are_refused(tmp_path: Path) -> None:
    """Through `.data`, which torch does not count."""

    class Drifting(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.add_(1)
            return super().forward(x)

    model = torch.nn.Sequential(Drifting().requires_grad_(False), torch.nn.Linear(4, 2))
    with (
        cache_frozen(model, tmp_path),
        pytest.raises(ConfigurationError, match="changes its own weights or buffers"),
    ):
        model(torch.randn(3, 4))


def test_another_number_of_threads_is_a_miss(tmp_path: Path) -> None:
    batch, before = one_batch(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert hits_of(llama(), [batch, batch], tmp_path) == [0, BATCH]
        torch.set_num_threads(2)
        assert hits_of(llama(), [batch], tmp_path) == [0]
    finally:
        torch.set_num_threads(before)


def test_code_of_another_file_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = one_batch()
    assert hits_of(llama(), [batch, batch], tmp_path) == [0, BATCH]
    (edited := tmp_path / "edited.py").write_text("# another forward")
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "__file__", str(edited))
    assert hits_of(llama(), [batch], tmp_path) == [0]


def test_rows_of_which_some_are_known_are_computed(tmp_path: Path) -> None:
    rows = rows_of_text()
    first, second = ({name: one[at] for name, one in rows.items()} for at in ([0, 2, 1], [2, 3, 0]))
    assert hits_of(llama(), [first, second, second], tmp_path) == [0, 0, BATCH]


def test_unfrozen_weights_are_computed(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    with cache_frozen(model, tmp_path) as features:
        model(**batch)
        features.store.wait_for_writes()
        model.model.layers[0].requires_grad_(True)
        model(**batch).loss.backward()
        assert features.statistics["hit_rows"] == 0
        assert "a weight in it is trained" in features.report()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_part_whose_inputs_want_gradients_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of_text()
    models = [llama() for _ in range(2)]
    for model in models:
        model.model.embed_tokens.requires_grad_(True)
    kept, cached = train(models[0], rows, None), train(models[1], rows, tmp_path)
    assert cached.same_as(kept) and cached.hits == [0, 0]
    assert "its inputs want gradients" in one_warning_about("computed and not stored", caplog)


# -- What is refused, or stored as a whole ---------------------------------------------------------


def test_dropout_is_refused_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    batch = pixels(BATCH)
    model = TwoTowers(hidden_dropout_prob=0.1).train()
    error = pytest.raises(ConfigurationError, match=r"vision draws random numbers \(dropout\?\)")
    with cache_frozen(model, tmp_path), error:
        model(**batch)
    model.vision.eval()
    assert hits_of(model, [batch, batch], tmp_path) == [0, BATCH]


def test_batch_norms_are_refused_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    tower = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    tower.requires_grad_(False)
    model = torch.nn.Sequential(tower, torch.nn.Linear(4, 2))
    batch = {"input": torch.randn(6, 4)}
    error = pytest.raises(ConfigurationError, match="changes its own weights or buffers")
    with cache_frozen(model, tmp_path), error:
        model(**batch)
    tower.eval()
    assert hits_of(model, [batch, batch], tmp_path) == [0, 6]


def test_routed_experts_are_refused(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    model = transformers.MixtralForCausalLM(config)
    model.model.layers[0].requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"model\.layers\.0 routes tokens of all rows"):
        cache_frozen(model, tmp_path)


class SparseMoeBlock(torch.nn.Module):
    """Experts that are modules of a list, as in transformers 4; each is called with its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(2)
        )


@pytest.mark.parametrize("trained", ["gate", "none"])
def test_a_list_of_experts_is_no_part(trained: str, tmp_path: Path) -> None:
    block = SparseMoeBlock().requires_grad_(False)
    block.gate.requires_grad_(trained == "gate")
    model = torch.nn.Sequential(block, torch.nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match="routes tokens of all rows"):
        cache_frozen(model, tmp_path)


def test_a_model_without_a_frozen_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no frozen part"):
        cache_frozen(llama(frozen=0), tmp_path)
    with pytest.raises(ConfigurationError, match="does not exist"):
        cache_frozen(llama(), tmp_path / "missing")
    model = llama()
    error = pytest.raises(ConfigurationError, match="has a cache already")
    with cache_frozen(model, tmp_path), error:
        cache_frozen(model, tmp_path)


class Coupled(torch.nn.Module):
    """Rows that depend on each other, without a change of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input - input.mean(0))


def test_rows_that_depend_on_each_other_are_stored_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(Coupled().requires_grad_(False), torch.nn.Linear(4, 2))
    batch = torch.randn(6, 4)
    other = torch.cat([batch[:3], batch[:3] + 1])
    batches = [{"input": one} for one in (batch, batch, batch, other, other.flip(0), batch)]
    wanted = [model(**one) for one in batches]
    with cache_frozen(model, tmp_path) as features:
        hits = []
        for one, expected in zip(batches, wanted, strict=True):
            assert torch.equal(model(**one), expected)
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    assert hits == [0, 0, 6, 6, 6, 12]  # the first is only tried out
    one_warning_about("a call is stored as a whole", caplog)


class CoupledAndShifted(Coupled):
    """It gets an argument that has no rows."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + shift


def test_what_is_stored_together_may_share_an_argument(tmp_path: Path) -> None:
    first, last = CoupledAndShifted().requires_grad_(False), torch.nn.Linear(4, 2)
    model = torch.nn.ModuleList([first, last])
    x, shift = torch.randn(6, 4), torch.randn(4)
    wanted = first(x, shift)
    with cache_frozen(model, tmp_path) as features:
        for hits in (0, 0, 6):
            assert torch.equal(first(x, shift), wanted)
            features.store.wait_for_writes()
            assert features.statistics["hit_rows"] == hits


def test_a_mask_as_large_as_the_batch_is_not_taken_for_rows(tmp_path: Path) -> None:
    """[tokens, tokens], shared by all rows, where there are as many rows as tokens."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return mask @ self.inner(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Masked().requires_grad_(False)
            self.head = torch.nn.Linear(2, 2)

        def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
            return self.head(self.tower(**kwargs))

    model = Model()
    x, mask = torch.randn(3, 3, 2), torch.randn(3, 3)
    other = mask.clone()
    other[2] += 1  # only the last row of the mask, which all rows of the batch see
    batches = [{"x": x, "mask": one} for one in (mask, mask, other, other)]
    wanted = [model(**one) for one in batches]
    with cache_frozen(model, tmp_path):
        assert all(
            torch.equal(model(**one), expected)
            for one, expected in zip(batches, wanted, strict=True)
        )


# -- Values in the middle of what is skipped -------------------------------------------------------


@contextlib.contextmanager
def skipping(model: torch.nn.Module, batch: Batch, directory: Path) -> Any:
    """A context in which the model's frozen part finds this batch."""
    with cache_frozen(model, directory) as features:
        model(**batch)
        features.store.wait_for_writes()
        yield features


def test_hidden_states_of_skipped_layers_are_right(tmp_path: Path) -> None:
    batch, model = one_batch() | {"output_hidden_states": True}, llama()
    wanted = model(**batch).hidden_states
    with skipping(model, batch, tmp_path) as features:
        found = model(**batch).hidden_states
        assert features.statistics["hit_rows"] == BATCH
        assert type(found[1]) is SkippedTensor and found[1].shape == wanted[1].shape
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))
        assert (found[2] - wanted[2]).abs().max() == 0
        assert found[2].numpy().tobytes() == wanted[2].numpy().tobytes()


def test_attentions_of_skipped_layers_are_computed(tmp_path: Path) -> None:
    batch, model = one_batch(), llama(attn_implementation="eager")
    wanted = model(**batch, output_attentions=True).attentions
    with skipping(model, batch, tmp_path) as features:
        found = model(**batch, output_attentions=True).attentions
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        model(**batch)
        assert features.statistics["hit_rows"] == BATCH  # and skipped again


def test_the_cache_of_keys_and_values_is_right(tmp_path: Path) -> None:
    """It is there by default, in training too."""
    batch, model = one_batch(), llama()
    wanted = model(**batch).past_key_values
    with skipping(model, batch, tmp_path) as features:
        found = model(**batch).past_key_values
        assert features.statistics["hit_rows"] == BATCH
        assert found.get_seq_length() == TOKENS
        for one, other in zip(found.layers, wanted.layers, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_a_copy_of_a_cache_that_was_not_filled_is_filled(tmp_path: Path) -> None:
    batch, model = one_batch(), llama().eval()
    with torch.no_grad():
        wanted = model(**batch).past_key_values
        with skipping(model, batch, tmp_path):
            found = copy.deepcopy(model(**batch).past_key_values)
    assert torch.equal(found.layers[0].keys, wanted.layers[0].keys)


def test_generation_is_the_same(tmp_path: Path) -> None:
    model = llama().eval()
    prompt = {name: one_batch()[name] for name in ("input_ids", "attention_mask")}
    wanted = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            found = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert torch.equal(found, wanted)
            features.store.wait_for_writes()


def test_weights_that_change_before_a_skipped_value_is_used_are_an_error(tmp_path: Path) -> None:
    batch, model = one_batch() | {"output_hidden_states": True}, llama()
    with skipping(model, batch, tmp_path):
        found = model(**batch).hidden_states
        _in_place(model.model.layers[0].mlp.up_proj.weight)
        with pytest.raises(OffloadError, match="have changed before a value in its middle"):
            found[1].sum()


def test_hooks_of_others_see_real_values(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    seen: list[torch.Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        seen.append(output.sum())

    handles = [layer.register_forward_hook(hook) for layer in model.model.layers]
    wanted = model(**batch).loss
    expected, seen[:] = list(seen), []
    with skipping(model, batch, tmp_path):
        seen.clear()
        loss = model(**batch).loss
    assert torch.equal(loss, wanted) and all(map(torch.equal, seen, expected))
    for one in handles:
        one.remove()


def test_a_hook_that_changes_a_layers_result_counts(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    with skipping(model, batch, tmp_path):
        handle = model.model.layers[1].register_forward_hook(lambda *args: args[2] * 1.5)
        loss = model(**batch).loss
    assert torch.equal(loss, model(**batch).loss)
    handle.remove()
    assert not torch.equal(loss, model(**batch).loss)


def test_a_hook_inside_of_a_layer_is_called(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    calls: list[int] = []
    with skipping(model, batch, tmp_path) as features:
        inner = model.model.layers[1].mlp
        handle = inner.register_forward_hook(lambda *_: calls.append(1))
        model(**batch)
        assert calls == [1] and "has hooks" in features.report()
        handle.remove()
        model(**batch)
        assert calls == [1] and features.statistics["hit_rows"] == BATCH


def test_an_operation_in_place_on_a_skipped_value_counts(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()

    def double(module: Any, args: Any, output: torch.Tensor) -> None:
        output.mul_(2)

    with skipping(model, batch, tmp_path):
        handle = model.model.layers[1].register_forward_hook(double)
        loss = model(**batch).loss
    assert torch.equal(loss, model(**batch).loss)
    handle.remove()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_trains_the_same(tmp_path: Path, use_reentrant: bool) -> None:
    rows = rows_of_text()

    def make() -> Any:
        model = llama(frozen=2)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    kept, cached = train(make(), rows, None), train(make(), rows, tmp_path)
    assert cached.same_as(kept)
    assert cached.hits == [0, 2 * BATCH]


def test_an_error_in_the_middle_of_a_pass_leaves_the_next_one_right(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    other = changed(batch, "input_ids", 0, 3)
    wanted = model(**other).loss

    def fail(*_: Any) -> None:
        raise RuntimeError("by the test")

    with cache_frozen(model, tmp_path) as features:
        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="by the test"):
            model(**batch)
        handle.remove()
        assert torch.equal(model(**other).loss, wanted)
        features.store.wait_for_writes()
        assert torch.equal(model(**other).loss, wanted)


def test_a_copy_of_the_model_has_its_own_forward(tmp_path: Path) -> None:
    batch, model = one_batch(), llama()
    with skipping(model, batch, tmp_path) as features:
        copied = copy.deepcopy(model)
        _in_place(copied.model.layers[0].mlp.up_proj.weight)
        assert not torch.equal(copied(**batch).loss, model(**batch).loss)
        assert features.statistics["hit_rows"] == BATCH  # of the model
    assert "forward" not in vars(model.model.layers[0])


# -- Disk ------------------------------------------------------------------------------------------


def test_a_full_disk_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.offload.frozen.store._SPARE_BYTES", 1 << 62)
    rows = rows_of_text()
    cached = train(llama(), rows, tmp_path)
    assert cached.same_as(train(llama(), rows, None)) and cached.hits == [0, 0]


def test_a_budget_stores_what_fits(tmp_path: Path) -> None:
    rows = rows_of_text()
    row_bytes = TOKENS * 32 * 4
    cached = train(llama(), rows, tmp_path, shuffled=False, budget_bytes=BATCH * row_bytes)
    assert cached.same_as(train(llama(), rows, None, shuffled=False))
    assert cached.hits == [0, BATCH]


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    rows = rows_of_text()
    kept = train(llama(), rows, tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("*/*"))):
        body = bytearray(path.read_bytes())
        body[-20] ^= 1
        path.write_bytes(body if number % 2 else body[: len(body) // 2])
    assert train(llama(), rows, tmp_path).same_as(kept)
    assert train(llama(), rows, tmp_path).hits == [2 * BATCH, 2 * BATCH]


# -- Epochs ----------------------------------------------------------------------------------------


def test_an_epoch_without_hits_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch, model = one_batch(), llama()
    with cache_frozen(model, tmp_path) as features:
        for epoch in range(3):
            model(**changed(batch, "input_ids", 0, epoch))
            features.end_epoch()
            assert len([one for one in caplog.messages if "an epoch has ended" in one]) == epoch
    caplog.clear()
    with cache_frozen(model, tmp_path) as features:
        for _ in range(3):
            model(**batch)
            features.store.wait_for_writes()
            features.end_epoch()
    assert not caplog.messages


def test_rows_of_the_next_batch_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rows, model = rows_of_text(4 * BATCH), llama()
    with cache_frozen(model, tmp_path) as features:
        for epoch in range(3):
            order = torch.randperm(4 * BATCH, generator=torch.Generator().manual_seed(epoch))
            batches = [{k: v[one] for k, v in rows.items()} for one in order.split(BATCH)]
            ahead = []
            for batch in features.ahead(batches):
                ahead.append(len(features.store._ahead))
                model(**batch)
                features.store.wait_for_writes()
            first = [0] * 4 if epoch == 0 else [BATCH, 2 * BATCH, 2 * BATCH, BATCH]
            assert ahead == first if epoch else ahead[0] == 0
    assert features.statistics["hit_rows"] == 8 * BATCH
    assert not caplog.messages


class Scaled(torch.nn.Module):
    """A layer with an argument beside hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x if scale is None else x * scale)


class LaterArgument(torch.nn.Module):
    """Only the second of its frozen layers gets the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Scaled(), Scaled(), Scaled()])
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(first(x), scale))


def test_arguments_of_later_layers_count(tmp_path: Path) -> None:
    model = LaterArgument()
    x, scale = torch.randn(6, 4), torch.randn(6, 4)
    batches = [{"x": x, "scale": one} for one in (scale, scale, scale + 1, scale)]
    wanted = [model(**one) for one in batches]
    with cache_frozen(model, tmp_path) as features:
        hits = []
        for one, expected in zip(batches, wanted, strict=True):
            assert torch.equal(model(**one), expected)
            features.store.wait_for_writes()
            hits.append(features.statistics["hit_rows"])
    assert hits == [0, 6, 6, 12]


class BetweenLayers(torch.nn.Module):
    """Computes something between its frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Scaled(), Scaled(), Scaled()])
        self.layers[:2].requires_grad_(False)
        self.added = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(first(x) + self.added))


def test_what_a_model_computes_between_layers_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"x": torch.randn(6, 4)}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(BetweenLayers())
    kept = train(models[0], rows, None, loss_of=torch.sum)
    cached = train(models[1], rows, tmp_path, loss_of=torch.sum)
    assert cached.same_as(kept) and cached.hits == [0, 0]
    one_warning_about("its modules get tensors that want gradients", caplog)


@pytest.mark.parametrize("comes_first", [True, False])
def test_weights_that_are_offloaded_are_not_in_keys(comes_first: bool, tmp_path: Path) -> None:
    """They are not there to be looked at: refused, or computed where they leave later."""
    model = llama()
    batch = one_batch()
    expected = model(**batch).loss
    (tmp_path / "parameters").mkdir()
    (tmp_path / "features").mkdir()
    if comes_first:
        refused = pytest.raises(ConfigurationError, match="keep frozen parts")
        with offload_parameters(model, tmp_path / "parameters"), refused:
            cache_frozen(model, tmp_path / "features")
        return
    with cache_frozen(model, tmp_path / "features") as features:
        with offload_parameters(model, tmp_path / "parameters"):
            for _ in range(2):
                assert torch.equal(model(**batch).loss, expected)
        assert "a weight in it is offloaded" in features.report()
        assert features.statistics["hit_rows"] == features.statistics["stored_bytes"] == 0


class LooksAtMasks(torch.nn.Module):
    """Takes another way, which rounds otherwise, where no row is padded, as encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.all():
            return self.inner(x)
        result: torch.Tensor = self.inner(x) * mask.unsqueeze(-1) * 3 / 7 / 3 * 7
        return result


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_rows_without_padding_are_others_beside_padded_ones(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = torch.nn.ModuleList([LooksAtMasks().requires_grad_(False), torch.nn.Linear(8, 1)])
    rows, mask = torch.randn(6, 5, 8), torch.ones(6, 5, dtype=dtype)
    mask[3:, 4] = 0
    batches = [[0, 3], [1, 2], [4, 5], [1, 4], [0, 1], [1, 0], [4, 1]]
    expected = [model[0](rows[one], mask[one]) for one in batches]
    with cache_frozen(model, tmp_path) as features:
        for batch, result in zip(batches, expected, strict=True):
            assert torch.equal(model[0](rows[batch], mask[batch]), result)
            features.store.wait_for_writes()
        assert features.statistics["hit_rows"] >= 4
