# SPDX-License-Identifier: Apache-2.0
"""A chunked loss in other people's training loops, with their own settings: mixed precision,
evaluation, resuming, and trainers that compute the loss themselves, which is said.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import offload_activations, offload_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402
from tests.integrations.test_trainer import (  # noqa: E402
    arguments,
    sentences,
    tokenizer,
    weights,
)
from tests.support.text_models import HIDDEN, WORDS  # noqa: E402

TOKENS = 24
SMALL = {"min_bytes": "1KiB"}
SMALL_STATES = {"bucket_bytes": "64KiB", "window_bytes": "192KiB"}
IDLE = "chunked_loss does nothing for LlamaForCausalLM"


def new_llama(seed: int = 5) -> Any:
    """With whatever its configuration has by default, its cache too."""
    torch.manual_seed(seed)
    settings = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=TOKENS + 8,
    )
    return transformers.LlamaForCausalLM(settings)


def rows(number: int = 24) -> list[dict[str, torch.Tensor]]:
    """Each with another number of tokens that have a label."""
    draw, made = torch.Generator().manual_seed(3), []
    for row in range(number):
        tokens = torch.randint(0, WORDS, (TOKENS,), generator=draw)
        labels = tokens.clone()
        labels[: 2 + (row * 5) % 20] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def trained(
    folder: Path,
    callbacks: list[Any],
    model: Any = None,
    *,
    resume: Path | None = None,
    compute_metrics: Any = None,
    **changes: Any,
) -> Any:
    """A Trainer that has trained."""
    trainer = transformers.Trainer(
        new_llama() if model is None else model,
        transformers.TrainingArguments(**arguments(folder, learning_rate=1e-3, **changes)),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=callbacks,
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def logged(trainer: Any, *names: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history for name in names if name in line]


def chunked(directory: Path | None = None, **settings: Any) -> OffloadCallback:
    """A callback with chunks of seven tokens, which divide nothing."""
    return OffloadCallback(
        directory,
        **{"chunked_loss": 7, **(SMALL if directory is not None else {"mode": "off"}), **settings},
    )


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"gradient_accumulation_steps": 3}, 2e-6),
        ({"bf16": True}, 2e-3),
        ({"bf16": True, "gradient_accumulation_steps": 3}, 2e-3),
        ({"bf16": True, "gradient_checkpointing": True}, 2e-3),
    ],
    ids=str,
)
def test_the_trainer_comes_to_the_same_losses_within_rounding(
    changes: dict[str, Any], most: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = trained(tmp_path, [], **changes)
    callback = chunked(tmp_path)
    found = trained(tmp_path, [callback], **changes)
    for name in ("loss", "grad_norm"):
        expected = logged(own, name)
        assert len(expected) == 4
        assert logged(found, name) == pytest.approx(expected, rel=most)
    assert weights(found.model) != weights(own.model)  # it was another order of sums
    assert callback.offload is not None and callback.offload.statistics["offloaded_bytes"] > 0
    assert IDLE not in caplog.text


def test_evaluation_has_its_logits(tmp_path: Path) -> None:
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    own, found = (
        trained(
            tmp_path,
            callbacks,
            bf16=True,
            eval_strategy="steps",
            eval_steps=2,
            compute_metrics=metrics,
        )
        for callbacks in ([], [chunked(tmp_path)])
    )
    assert shapes == [(4, TOKENS, WORDS)] * 4
    for name in ("eval_loss", "eval_right"):
        assert logged(found, name) == pytest.approx(logged(own, name), rel=2e-3, abs=0.02)
        assert len(logged(own, name)) == 2


@pytest.mark.slow
def test_parameters_states_and_activations_that_move_change_no_bit_and_a_training_resumes(
    tmp_path: Path,
) -> None:
    settings = {"bf16": True, "gradient_accumulation_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 2}
    own = trained(tmp_path / "own", [], **settings)
    whole = trained(tmp_path / "whole", [chunked()], **settings, **saving)
    assert logged(whole, "loss") == pytest.approx(logged(own, "loss"), rel=2e-3)

    @contextlib.contextmanager
    def moving() -> Iterator[tuple[Any, OffloadCallback]]:
        model = new_llama()
        with offload_parameters(model, tmp_path) as parameters:
            yield model, chunked(tmp_path, optimizer_states=SMALL_STATES)
            assert parameters.statistics["read_bytes"] > 0

    with moving() as (model, callback):
        found = trained(tmp_path / "moved", [callback], model, **settings, **saving)
        assert logged(found, "loss", "grad_norm") == logged(whole, "loss", "grad_norm")
    assert weights(model) == weights(whole.model)
    for folder in ("whole", "moved"):
        with moving() as (model, callback):
            trained(
                tmp_path / "resumed",
                [callback],
                model,
                resume=tmp_path / folder / "checkpoint-2",
                **settings,
            )
        assert weights(model) == weights(whole.model)


@pytest.mark.parametrize("is_prepared_first", [True, False])
def test_accelerates_mixed_precision_has_it_too(is_prepared_first: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in rows(1)[0]}

    def run(**settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = new_llama().train()
        prepared = accelerator.prepare(model) if is_prepared_first else model
        with offload_activations(prepared, tmp_path, **SMALL, **settings):
            if not is_prepared_first:
                prepared = accelerator.prepare(model)
            loss = prepared(**batch).loss
            accelerator.backward(loss)
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    own, found = run(), run(chunked_loss=7)
    assert found[0].item() == pytest.approx(own[0].item(), rel=1e-5)
    for name, gradient in own[1].items():
        assert float((found[1][name] - gradient).norm()) <= 2e-2 * float(gradient.norm()), name


# -- trainers that compute the loss themselves -----------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one sentence that says chunks do nothing."""
    (sentence,) = [record.getMessage() for record in caplog.records if IDLE in record.getMessage()]
    return sentence


def own_loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss / num_items_in_batch


def test_a_trainer_that_smooths_labels_needs_the_logits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"label_smoothing_factor": 0.1, "bf16": True}
    own = trained(tmp_path, [], **changes)
    found = trained(tmp_path, [chunked(tmp_path)], **changes)
    assert weights(found.model) == weights(own.model)
    assert "came without labels" in said(caplog) and "label_smoothing_factor" in said(caplog)
    assert "give the labels to the model" in said(caplog)


def _sft(tmp_path: Path, callbacks: list[Any], **changes: Any) -> Any:
    import datasets
    import trl

    return trl.SFTTrainer(
        new_llama(),
        args=trl.SFTConfig(**arguments(tmp_path, max_length=TOKENS, **changes)),
        train_dataset=datasets.Dataset.from_dict({"text": sentences(16, TOKENS)}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _dpo(tmp_path: Path, callbacks: list[Any], **changes: Any) -> Any:
    import datasets
    import trl

    prompt, chosen, rejected = sentences(16, 4), sentences(16, 16), sentences(16, 12)
    columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return trl.DPOTrainer(
        new_llama(),
        ref_model=new_llama(),
        args=trl.DPOConfig(**arguments(tmp_path, **changes)),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _grpo(tmp_path: Path, callbacks: list[Any], **changes: Any) -> Any:
    import datasets
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(one.split()))) for one in completions]

    settings = {"max_completion_length": 6, "num_generations": 2, "max_steps": 2, **changes}
    return trl.GRPOTrainer(
        new_llama(),
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments(tmp_path, **settings)),
        train_dataset=datasets.Dataset.from_dict({"prompt": sentences(16, 4)}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make", [_sft, _dpo, _grpo])
@pytest.mark.parametrize("changes", [{}, {"bf16": True}], ids=["", "bf16"])
def test_trainers_of_trl_have_a_head_of_their_own_and_it_is_said(
    make: Callable[..., Any],
    changes: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their defaults for gradient checkpointing, bf16 and whatever else they set, or bf16."""
    pytest.importorskip("trl", reason="trl is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    changes = {"bf16": False, **changes}  # their default where a device has it
    trainers = []
    for callbacks in ([], [chunked(tmp_path)]):
        torch.manual_seed(5)
        trainers.append(make(tmp_path, callbacks, **changes))
        trainers[-1].train()
    own, found = trainers
    assert weights(found.model) == weights(own.model)
    assert "TRL's trainer computes the loss with a fused head of its own" in said(caplog)
    assert "drop chunked_loss" in said(caplog)


def test_a_kernel_that_takes_the_output_layers_weight_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `use_liger_kernel` does it: another forward of the class."""

    class Fused(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
            return transformers.modeling_outputs.CausalLMOutput(
                loss=self.loss_function(logits, labels, WORDS)
            )

    model = Fused(new_llama().config).train()
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in rows(1)[0]}
    with offload_activations(model, mode="off", chunked_loss=7):
        for _ in range(2):
            model(**batch).loss.backward()
    (sentence,) = [one.getMessage() for one in caplog.records if "does nothing" in one.getMessage()]
    assert "Fused" in sentence and "use_liger_kernel" in sentence


def test_another_output_layer_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = new_llama().train()
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in rows(1)[0]}
    with offload_activations(model, mode="off", chunked_loss=7):
        model.resize_token_embeddings(WORDS + 1)
        model(**batch).loss.backward()
    (sentence,) = [one.getMessage() for one in caplog.records if "does nothing" in one.getMessage()]
    assert "it has another output layer since (resize_token_embeddings" in sentence


def test_nothing_is_said_of_evaluations_and_of_passes_that_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = new_llama().train()
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in rows(1)[0]}
    with (
        caplog.at_level(logging.WARNING),
        offload_activations(model, mode="off", chunked_loss=7),
    ):
        with torch.no_grad():
            model(input_ids=batch["input_ids"])
        model.eval()(input_ids=batch["input_ids"])
        with pytest.raises(ValueError, match="stop"):
            model.train()(**batch, output_attentions=_Stops())
        model(**batch).loss.backward()
    assert "does nothing" not in caplog.text


class _Stops:
    """What a forward pass fails at."""

    def __bool__(self) -> bool:
        raise ValueError("stop")
