# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, TRL, PEFT and Accelerate: the same bits with one line more."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, offload_activations, offload_parameters
from megatron.offload.integration.open_streams import OPEN
from tests.support.same_training import digest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402
from tests.support.text_models import WORDS, llama, text_batches  # noqa: E402

SMALL = {"min_bytes": "4KiB"}


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    """Rows of a data set: tokens that are their own labels."""
    batches = text_batches(num_steps=number)
    return [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }


def weights(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(one) for name, one in model.named_parameters()}


def results(trainer: Any) -> tuple[list[Any], dict[str, str]]:
    """Losses and gradient norms of all log lines, and the weights."""
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    lines = [[line.get(name) for name in names] for line in trainer.state.log_history]
    return lines, weights(trainer.model)


def trained(
    folder: Path, callbacks: list[Any], model: torch.nn.Module, **changes: Any
) -> tuple[Any, Any]:
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments(folder, **changes)),
        train_dataset=rows(16),
        eval_dataset=rows(4),
        callbacks=callbacks,
    )
    return trainer, results(trainer)


def new_llama() -> torch.nn.Module:
    torch.manual_seed(5)
    return llama(attention_dropout=0.1)


@pytest.mark.slow(but="checkpointing")
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"gradient_checkpointing": True},
        {"bf16": True},
    ],
    ids=["accumulation and evaluation", "checkpointing", "bf16"],
)
def test_the_trainer_comes_to_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    _, expected = trained(tmp_path, [], new_llama(), **changes)
    callback = OffloadCallback(tmp_path, **SMALL)
    trainer, found = trained(tmp_path, [callback], new_llama(), **changes)
    assert found == expected
    assert callback.offload is not None and callback.offload.statistics["offloaded_storages"] > 5
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4 and all(line["offload/offloaded_gib"] * 2**30 > 1e5 for line in lines)


SMALL_STATES = {"bucket_bytes": "64KiB", "window_bytes": "192KiB"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}])
def test_the_optimizers_states_move_too_and_keep_their_bits(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    _, expected = trained(tmp_path, [], new_llama(), **changes)
    callback = OffloadCallback(tmp_path, optimizer_states=SMALL_STATES, **SMALL)

    class Looks(transformers.TrainerCallback):
        away = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            states = kwargs["optimizer"].optimizer.state.values()
            self.away += sum(one["exp_avg"].device.type == "meta" for one in states)

    looks = Looks()
    _, found = trained(tmp_path, [callback, looks], new_llama(), **changes)
    assert found == expected and looks.away > 10


@pytest.mark.slow
def test_a_training_with_states_on_an_ssd_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _, expected = trained(tmp_path / "whole", [], new_llama(), **saving)

    def callbacks() -> list[Any]:
        return [OffloadCallback(tmp_path, optimizer_states=SMALL_STATES, **SMALL)]

    _, found = trained(tmp_path / "offloaded", callbacks(), new_llama(), **saving)
    assert found == expected
    for folder in ("whole", "offloaded"):
        resumed = transformers.Trainer(
            new_llama(),
            transformers.TrainingArguments(**arguments(tmp_path / "resumed", max_steps=4)),
            train_dataset=rows(16),
            callbacks=callbacks(),
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        assert weights(resumed.model) == expected[1]


@pytest.mark.slow
def test_a_training_with_parameters_on_an_ssd_too_resumes_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _, expected = trained(tmp_path / "whole", [], new_llama(), **saving)

    def offloaded(folder: Path, **settings: Any) -> Any:
        model = new_llama()
        with offload_parameters(model, tmp_path):
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(**arguments(folder, **saving)),
                train_dataset=rows(16),
                callbacks=[OffloadCallback(tmp_path, optimizer_states=SMALL_STATES, **SMALL)],
            )
            trainer.train(**settings)
        return weights(model)

    assert offloaded(tmp_path / "offloaded") == expected[1]
    for folder in ("whole", "offloaded"):
        checkpoint = str(tmp_path / folder / "checkpoint-2")
        found = offloaded(tmp_path / "resumed", resume_from_checkpoint=checkpoint)
        assert found == expected[1]


@pytest.mark.slow
def test_a_log_line_has_all_micro_batches_of_its_optimizer_steps(tmp_path: Path) -> None:
    def logged(**changes: Any) -> list[float]:
        callback = OffloadCallback(tmp_path, **SMALL)
        trainer, _ = trained(tmp_path, [callback], new_llama(), **changes)
        name = "offload/offloaded_gib"
        return [line[name] for line in trainer.state.log_history if name in line]

    (once, *_) = logged()
    assert logged(gradient_accumulation_steps=2) == pytest.approx([2 * once] * 4, rel=1e-3)
    assert logged(logging_steps=2) == [once] * 2


@pytest.mark.slow
def test_the_summary_is_logged_and_a_second_training_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = OffloadCallback(tmp_path, **SMALL)
    with caplog.at_level(logging.INFO, logger="megatron.offload"):
        trainer, _ = trained(tmp_path, [callback], new_llama())
        first = callback.offload
        trainer.train()
    assert callback.offload is not first
    assert sum("median of" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.slow
def test_a_training_that_failed_leaves_no_hook_for_the_next(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("stop")

    callback = OffloadCallback(tmp_path, **SMALL)
    model = new_llama()
    with pytest.raises(ValueError, match="stop"):
        trained(tmp_path, [callback, Fails()], model)
    trained(tmp_path, [callback], model)


def test_a_training_that_cannot_begin_leaves_nothing_open(tmp_path: Path) -> None:
    """Its parameters move first, and its activations are refused then."""
    model = new_llama()
    callback = OffloadCallback(tmp_path, parameters=True, layers=["Nope"])
    with pytest.raises(ConfigurationError, match="names no module"):
        trained(tmp_path, [callback], model)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert not list(OPEN.trainers) and not list(OPEN.parameters)
    assert weights(model) == weights(new_llama())


@pytest.mark.slow
def test_a_training_that_was_interrupted_is_not_in_the_way_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupts(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    first, second, other = (OffloadCallback(tmp_path, **SMALL) for _ in range(3))
    model = new_llama()
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, [first, Interrupts()], model)
    trained(tmp_path, [other], new_llama())
    assert first.offload is not None and first.offload.engine is not None  # another's model is not
    trained(tmp_path, [second], model)
    assert first.offload.engine is None
    assert second.offload is not None and second.offload.statistics["offloaded_storages"] > 5
    assert sum("has not ended" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_tensorboard_has_what_moved(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = OffloadCallback(tmp_path, **SMALL)
    trained(tmp_path, [callback], new_llama(), report_to=["tensorboard"])
    (board,) = (tmp_path / "runs").iterdir()  # the Trainer's own
    (file,) = board.glob("events.*")  # and no other writer's
    events = EventAccumulator(str(file))
    events.Reload()
    found = events.Tags()["scalars"]
    assert "train/offload/offloaded_gib" in found and "train/loss" in found
    assert len(events.Scalars("train/offload/offloaded_gib")) == 4


class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
    """Sees what W&B's callback sees: it stands before those of `callbacks=`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.lines.append(dict(logs))


def figures(line: dict[str, Any]) -> dict[str, float]:
    return {name: one for name, one in line.items() if name.startswith("offload/")}


def test_every_reporter_sees_the_figures_of_the_history(tmp_path: Path) -> None:
    reporter, callback = Reporter(), OffloadCallback(tmp_path, **SMALL)
    trainer, _ = trained(tmp_path, [reporter, callback], new_llama())
    history = [figures(line) for line in trainer.state.log_history if "loss" in line]
    assert [figures(line) for line in reporter.lines] == history and len(history) == 4
    moved = ("offloaded_gib", "written_gib", "read_gib", "stall_s", "write_wait_s")
    names = {*moved, "peak_activation_gib", "peak_device_gib"}  # and none of auto's, without a plan
    assert set(history[0]) == {f"offload/{name}" for name in names}
    for line in history:
        assert 0 < line["offload/peak_activation_gib"] < line["offload/peak_device_gib"] < 64


def lines_of_a_file(
    tmp_path: Path, settings: dict[str, Any], **changes: Any
) -> tuple[list[dict[str, Any]], Any]:
    """The lines of a training's metrics file, and its trainer."""
    file = tmp_path / "metrics.jsonl"
    callback = OffloadCallback(tmp_path, metrics_file=file, **settings)
    trainer, _ = trained(tmp_path, [callback], new_llama(), **changes)
    return [json.loads(line) for line in file.read_text().splitlines()], trainer


@pytest.mark.parametrize(
    "settings", [pytest.param(SMALL, id="ssd"), pytest.param({"mode": "off"}, id="off")]
)
def test_the_metrics_file_has_a_line_for_each_optimizer_step(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    found, trainer = lines_of_a_file(tmp_path, settings, gradient_accumulation_steps=2)
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in found] == [line[name] for line in history]
    for line, logged in zip(found, history, strict=True):
        tokens = line["tokens_per_s"] * line["step_time_s"]
        assert tokens == pytest.approx(2 * text_batches()[0]["input_ids"].numel())
        for name in ("activation", "device"):
            gib = line[f"peak_{name}_bytes"] / 2**30
            assert logged[f"offload/peak_{name}_gib"] == pytest.approx(gib, rel=1e-3)
        if settings == SMALL:
            moved = line["offload"]["offloaded_bytes"] / 2**30
            assert logged["offload/offloaded_gib"] == pytest.approx(moved, rel=1e-3)
        else:
            assert not line["offload"]


def test_the_metrics_file_has_a_loss_where_the_trainer_logs_one(tmp_path: Path) -> None:
    found, trainer = lines_of_a_file(tmp_path, {"mode": "off"}, logging_steps=2)
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert [line["loss"] for line in found] == [None, logged[2], None, logged[4]]


def test_the_metrics_file_of_a_training_that_goes_on_counts_its_steps(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trained(tmp_path, [], new_llama(), **saving)
    file = tmp_path / "metrics.jsonl"
    trainer = transformers.Trainer(
        new_llama(),
        transformers.TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(16),
        callbacks=[OffloadCallback(tmp_path, metrics_file=file, **SMALL)],
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [3, 4]


def test_without_offload_the_log_has_the_peaks_to_compare_with(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, [OffloadCallback(tmp_path, mode="off")], new_llama())
    names = {"offload/peak_activation_gib", "offload/peak_device_gib"}
    assert set(figures(trainer.state.log_history[0])) == names


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        (SMALL, "left device memory in each step, which waited"),
        ({"min_bytes": "1GiB"}, "nothing left device memory; peak activation memory"),
    ],
    ids=["moves", "moves nothing"],
)
def test_a_training_begins_and_ends_with_a_line(
    settings: dict[str, Any], end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, [OffloadCallback(tmp_path, **settings)], new_llama())
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("activation")]
    assert len(said) == 2
    assert "LlamaForCausalLM" in said[0] and "model.layers.0 to model.layers." in said[0]
    assert f"ssd, storages of {'4 KiB' if settings == SMALL else '1 GiB'}" in said[0]
    assert said[0].endswith(f"in {tmp_path}") and end in said[1]
    if settings != SMALL:
        assert "stayed in storages that are too small" in said[1]


@pytest.mark.parametrize(
    ("settings", "opening", "warned"),
    [
        ({"mode": "off", "optimizer_states": True}, "in memory; optimizer states move", []),
        (
            {"parameters": True, **SMALL},
            "; parameters too",
            ["inside_graphs=True", "at each layer"],
        ),
        ({"inside_graphs": True, **SMALL}, "", []),
    ],
)
def test_a_trainer_that_compiles_is_told_what_that_comes_to(
    settings: dict[str, Any],
    opening: str,
    warned: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = OffloadCallback(tmp_path, **settings)
    compiles = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
    trained(tmp_path, [callback], new_llama(), **compiles)
    assert opening in capsys.readouterr().out
    said = [one.getMessage() for one in caplog.records if "as a whole" in one.getMessage()]
    assert len(said) == bool(warned) and all(one in said[0] for one in warned)


def test_a_trainer_that_is_told_to_be_silent_gets_no_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = OffloadCallback(tmp_path, **SMALL)
    trained(tmp_path, [callback], new_llama(), log_level="error")
    assert "activation offload" not in capsys.readouterr().out
    assert callback.offload is not None and callback.offload.statistics["offloaded_storages"] > 5


def test_parameters_move_by_a_keyword_and_keep_their_bits(tmp_path: Path) -> None:
    _, expected = trained(tmp_path, [], new_llama())
    callback = OffloadCallback(
        tmp_path, optimizer_states=SMALL_STATES, parameters={"live_units": 2}, **SMALL
    )

    class Looks(transformers.TrainerCallback):
        read_bytes = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            parameters, _ = callback.others
            self.read_bytes = parameters.statistics["read_bytes"]

    looks = Looks()
    _, found = trained(tmp_path, [callback, looks], new_llama())
    assert found == expected and looks.read_bytes > 1e5 and not callback.others


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"modes": "ssd"}, "there is no setting 'modes'; did you mean mode"),
        ({"mode": "sdd"}, "mode: 'sdd' is none of its values"),
        ({"min_bytes": "much"}, "min_bytes: 'much' is not a size"),
        ({"optimizer_states": {"window": "1GiB"}}, "did you mean window_bytes"),
        ({"parameters": {"mode": "auto"}}, "mode: 'auto' is none of its values"),
        ({"parameters": {"gradients": "on"}}, "its own steps.*; leave gradients out"),
    ],
)
def test_a_wrong_setting_is_refused_before_there_is_a_model(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        OffloadCallback(tmp_path, **settings)


def test_a_hooked_model_is_saved_and_copied_without_its_hooks(tmp_path: Path) -> None:
    model: Any = new_llama()
    batch = text_batches()[0]
    with offload_activations(model, tmp_path, **SMALL) as offload:
        model(**batch).loss.backward()
        before = offload.statistics
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(**batch).loss.backward()
            assert offload.statistics == before
        torch.save(model, tmp_path / "model.pt")
        torch.load(tmp_path / "model.pt", weights_only=False)(**batch)
        model(**batch).loss.backward()
        assert offload.statistics["offloaded_bytes"] == before["offloaded_bytes"]


# -- TRL ------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """A word for each number."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {str(number): number for number in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="1", pad_token="2", unk_token="0"
    )


def sentences(number: int, words: int = 48) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    return [
        " ".join(map(str, torch.randint(3, WORDS, (words,), generator=generator).tolist()))
        for _ in range(number)
    ]


def _compared(tmp_path: Path, make: Callable[[list[Any]], Any]) -> OffloadCallback:
    torch.manual_seed(5)
    expected = results(make([]))
    callback = OffloadCallback(tmp_path, **SMALL)
    torch.manual_seed(5)
    assert results(make([callback])) == expected
    assert callback.offload is not None and callback.offload.statistics["offloaded_storages"] > 2
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_sft_comes_to_the_same_bits(checkpointing: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"text": sentences(16)})

    def make(callbacks: list[Any]) -> Any:
        settings = arguments(tmp_path, gradient_checkpointing=checkpointing, max_length=64)
        return trl.SFTTrainer(
            new_llama(),
            args=trl.SFTConfig(**settings),
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=callbacks,
        )

    _compared(tmp_path, make)


@pytest.mark.slow
def test_dpo_with_its_copied_reference_comes_to_the_same_bits(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    prompt, chosen, rejected = sentences(16, 8), sentences(16, 40), sentences(16, 30)
    data = datasets.Dataset.from_dict({"prompt": prompt, "chosen": chosen, "rejected": rejected})

    def make(callbacks: list[Any]) -> Any:
        return trl.DPOTrainer(
            new_llama(),
            ref_model=new_llama(),
            args=trl.DPOConfig(**arguments(tmp_path, gradient_checkpointing=False)),
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=callbacks,
        )

    _compared(tmp_path, make)


# -- PEFT and Accelerate -------------------------------------------------------------------------


@pytest.mark.slow
def test_lora_trains_its_adapters_the_same_and_no_frozen_weight_moves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def with_lora() -> Any:
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(new_llama(), adapters)

    _, expected = trained(tmp_path, [], with_lora())
    callback = OffloadCallback(tmp_path, **SMALL)
    model = with_lora()
    frozen = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.requires_grad}
    moved: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        from megatron.offload.activations.capture.hooks import SavedTensorHooks

        take = SavedTensorHooks.take

        def noting(self: Any, tensor: torch.Tensor, *others: Any) -> Any:
            moved.add(tensor.untyped_storage().data_ptr())
            return take(self, tensor, *others)

        patch.setattr(SavedTensorHooks, "take", noting)
        _, found = trained(tmp_path, [callback], model)
    assert found == expected
    assert moved and not moved & frozen


def test_accelerate_comes_to_the_same_bits(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def run(directory: Path | None) -> tuple[list[str], dict[str, str]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = new_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(rows(16), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        settings = {**SMALL} if directory is not None else {"mode": "off"}
        losses = []
        with offload_activations(model, directory, **settings) as offload:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(digest(loss))
            assert directory is None or offload.statistics["offloaded_storages"] > 5
        return losses, weights(model)

    assert run(tmp_path) == run(None)
