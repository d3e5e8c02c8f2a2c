# SPDX-License-Identifier: Apache-2.0
"""Models of transformers train with the door as they train without it, bit for bit."""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import LayerMajor, offload_activations
from tests.support.same_training import NUM_STEPS, Batch, train

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.text_models import (  # noqa: E402
    HIDDEN,
    LAYERS,
    TOKENS,
    WORDS,
    checkpointed_llama,
    llama,
    text_batches,
)

Model = Callable[[], torch.nn.Module]


def gpt2() -> torch.nn.Module:
    """With dropout, as its config has it."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=LAYERS,
            n_embd=HIDDEN,
            n_head=4,
            n_positions=TOKENS,
            vocab_size=WORDS,
        )
    )


def mixtral() -> torch.nn.Module:
    """A mixture of four experts, of which two work on each token."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=WORDS,
            output_router_logits=True,
        )
    )


def t5() -> torch.nn.Module:
    """Encoder and decoder, with dropout."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=HIDDEN,
            d_kv=16,
            d_ff=2 * HIDDEN,
            num_layers=2,
            num_heads=4,
            vocab_size=WORDS,
            decoder_start_token_id=0,
        )
    )


def bert() -> torch.nn.Module:
    """Predicts masked words, with dropout."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            vocab_size=WORDS,
            max_position_embeddings=TOKENS,
        )
    )


def vit() -> torch.nn.Module:
    """Classifies pictures of 32 by 32 points."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            image_size=32,
            patch_size=4,
            num_labels=10,
        )
    )


def whisper() -> torch.nn.Module:
    """Speech to text."""
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            d_model=HIDDEN,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=2 * HIDDEN,
            decoder_ffn_dim=2 * HIDDEN,
            vocab_size=WORDS,
            num_mel_bins=16,
            max_source_positions=TOKENS,
            max_target_positions=TOKENS,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _made(make: Callable[[torch.Generator], dict[str, torch.Tensor]]) -> list[Batch]:
    return [make(torch.Generator().manual_seed(step)) for step in range(NUM_STEPS)]


def pictures(dtype: torch.dtype) -> list[Batch]:
    return _made(
        lambda generator: {
            "pixel_values": torch.randn(4, 3, 32, 32, generator=generator).to(dtype),
            "labels": torch.randint(0, 10, (4,), generator=generator),
        }
    )


def speech(dtype: torch.dtype) -> list[Batch]:
    return _made(
        lambda generator: {
            "input_features": torch.randn(2, 16, 2 * TOKENS, generator=generator).to(dtype),
            "labels": torch.randint(3, WORDS, (2, 32), generator=generator),
        }
    )


def text(dtype: torch.dtype) -> list[Batch]:
    return text_batches()


MODELS: list[tuple[Model, Callable[[torch.dtype], list[Batch]], str]] = [
    (gpt2, text, "transformer.h.0"),
    (llama, text, "model.layers.0"),
    (checkpointed_llama, text, "model.layers.0"),
    (mixtral, text, "model.layers.0"),
    (t5, text, "encoder.block.0"),
    (bert, text, "bert.encoder.layer.0"),
    (vit, pictures, "vit.*layer*.0"),  # version 4 has them in an encoder
    (whisper, speech, "model.encoder.layers.0"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "batches", "first_layer"), MODELS, ids=[make.__name__ for make, _, _ in MODELS]
)
def test_a_model_trains_the_same(
    make: Model,
    batches: Callable[[torch.dtype], list[Batch]],
    first_layer: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    def in_dtype() -> torch.nn.Module:
        return make().to(dtype)

    names: list[str] = []
    expected = train(in_dtype, batches(dtype))
    found = train(in_dtype, batches(dtype), tmp_path, wrap=_noting_layers(names))
    assert found == expected
    assert all(one["offloaded_storages"] > 5 for one in found.statistics)
    assert found.left_bytes == 0
    assert fnmatch.fnmatchcase(names[0], first_layer)


def _noting_layers(names: list[str]) -> Any:
    from megatron.offload.integration.torch.layers import find_layers

    def note(model: torch.nn.Module) -> torch.nn.Module:
        names.extend(find_layers([model]).values())
        return model

    return note


def test_a_model_that_generates_between_steps_trains_the_same(tmp_path: Path) -> None:
    def call(model: Any, batch: Batch) -> torch.Tensor:
        made = model.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
        return model(input_ids=made, labels=made).loss + model(**batch).loss  # type: ignore

    found = train(llama, text_batches(), tmp_path, call=call)
    assert found == train(llama, text_batches(), call=call)
    assert all(one["offloaded_storages"] > 5 for one in found.statistics)


def in_units(model: torch.nn.Module, units: int | None, directory: Path) -> list[Any]:
    """Losses and gradients of two steps of three micro-batches, one by one or in units."""
    model.train()
    torch.manual_seed(6)
    results: list[Any] = []
    with offload_activations(model, directory, min_bytes="4KiB") as offload:
        layer_major = None if units is None else LayerMajor(model, units, offload=offload)
        for step in range(2):
            batches, losses = text_batches(step, 3), []
            if layer_major is None:
                for batch in batches:
                    losses.append(model(**batch).loss)
                    losses[-1].backward()
            else:
                losses = layer_major.step(batches, lambda batch: model(**batch).loss)
                assert offload.statistics["offloaded_bytes"] > 0
            gradients = {name: p.grad for name, p in model.named_parameters()}
            results.append(([one.detach() for one in losses], gradients))
            model.zero_grad()
    return results


def checkpointed(make: Model) -> Model:
    """With checkpoints that layer-major steps take: those of version 4 are reentrant by default."""

    def made() -> torch.nn.Module:
        model: Any = make()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    made.__name__ = f"checkpointed_{make.__name__}"
    return made


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (gpt2, {"transformer.wte.weight"}),  # tied to the output
        (checkpointed(gpt2), {"transformer.wte.weight"}),
        (llama, set()),
        (checkpointed(llama), set()),
        (t5, {"shared.weight", "encoder.", "decoder.block.0.layer.0.SelfAttention.relative"}),
    ],
)
def test_layer_major_steps_train_the_same(make: Model, near: set[str], tmp_path: Path) -> None:
    """Near where gradients are added in another order, see docs/layer-major.md."""
    torch.manual_seed(5)
    model = make()
    expected = in_units(copy.deepcopy(model), None, tmp_path)
    for (losses, mine), (their_losses, theirs) in zip(
        in_units(model, 3, tmp_path), expected, strict=True
    ):
        assert losses == their_losses
        for name, gradient in mine.items():
            if any(name.startswith(one) for one in near):
                largest = float(theirs[name].abs().max())
                assert (gradient - theirs[name]).abs().max() <= 1e-5 * largest, name
            else:
                assert torch.equal(gradient, theirs[name]), name


def compiled(model: torch.nn.Module, backend: str) -> torch.nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def compiled_by_layer(model: Any, backend: str) -> torch.nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("one_compute_thread")
@pytest.mark.parametrize("wraps_first", [True, False], ids=["door-last", "door-first"])
@pytest.mark.parametrize(
    ("wrap", "backend"),
    [
        (compiled, "aot_eager"),  # what is saved is what the default saves, without half a minute
        (compiled_by_layer, "aot_eager"),
        pytest.param(compiled, "inductor", marks=pytest.mark.rare),
        pytest.param(compiled_by_layer, "inductor", marks=pytest.mark.rare),
    ],
)
def test_a_compiled_model_trains_the_same(
    wrap: Any, backend: str, wraps_first: bool, tmp_path: Path
) -> None:
    wrap = functools.partial(wrap, backend=backend)
    found = train(llama, text_batches(), tmp_path, wrap=wrap, wraps_first=wraps_first)
    expected = train(llama, text_batches(), wrap=wrap)
    assert found == expected
    assert all(one["offloaded_storages"] > 5 for one in found.statistics)
