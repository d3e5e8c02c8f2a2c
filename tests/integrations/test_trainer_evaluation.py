# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer evaluates several batches unit by unit, and reads each unit once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import ConfigurationError, LayerMajor, offload_parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402
from tests.integrations.test_trainer import SMALL, arguments, rows  # noqa: E402
from tests.support.text_models import llama, text_batches  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_compute_thread")
NUM_ROWS = 11  # batches of two, and a last one of one


def trainer_of(model: Any, folder: Path, callback: OffloadCallback, **changes: Any) -> Any:
    changes = {"per_device_eval_batch_size": 2, "dataloader_drop_last": False} | changes
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments(folder, **changes)),
        train_dataset=rows(8),
        eval_dataset=rows(NUM_ROWS),
        callbacks=[callback],
    )


def results(trainer: Any) -> list[Any]:
    """What does not depend on time."""
    predicted = trainer.predict(rows(NUM_ROWS))
    found = [trainer.evaluate()["eval_loss"], predicted.metrics["test_loss"]]
    return [*found, torch.from_numpy(predicted.predictions), predicted.label_ids.tolist()]


@pytest.mark.parametrize("batches", [1, 4, 5, 6, 100])
def test_losses_and_predictions_have_the_same_bits(batches: int, tmp_path: Path) -> None:
    callback = OffloadCallback(tmp_path, **SMALL)
    trainer = trainer_of(llama(), tmp_path, callback)
    theirs = results(trainer)
    handle = callback.evaluate_in_units(trainer, batches=batches)
    mine = results(trainer)
    assert mine[:2] == theirs[:2] and mine[3] == theirs[3]
    assert torch.equal(mine[2], theirs[2])
    handle.close()
    assert "evaluation_loop" not in vars(trainer) and "prediction_step" not in vars(trainer)


def test_a_training_that_evaluates_has_the_same_bits(tmp_path: Path) -> None:
    """Also where hidden states wait on the SSD."""

    def trained(**units: Any) -> list[Any]:
        callback = OffloadCallback(tmp_path, boundary="ssd", **SMALL)
        changes = {"eval_strategy": "steps", "eval_steps": 2}
        torch.manual_seed(0)
        trainer = trainer_of(llama(), tmp_path, callback, **changes)
        if units:
            callback.evaluate_in_units(trainer, **units)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        return [[line.get(name) for name in names] for line in trainer.state.log_history]

    assert trained(batches=3, units=2) == trained()


def test_each_unit_is_read_once_for_a_group(tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    with offload_parameters(model, tmp_path) as parameters:
        callback = OffloadCallback(tmp_path)
        trainer = trainer_of(model, tmp_path, callback)

        def read() -> float:
            before = parameters.statistics["read_bytes"]
            trainer.evaluate()
            return float(parameters.statistics["read_bytes"] - before)

        alone = (read(), read())[1]
        callback.evaluate_in_units(trainer, batches=6)
        assert 0 < read() <= 1.05 * alone / 6


def test_no_batches_at_a_time_are_refused(tmp_path: Path) -> None:
    callback = OffloadCallback(tmp_path)
    with pytest.raises(ConfigurationError, match="0 batches at a time; give at least 1"):
        callback.evaluate_in_units(trainer_of(llama(), tmp_path, callback), batches=0)


# -- Models with their classes' defaults ----------------------------------------------------------


def test_caches_that_a_model_makes_by_default_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """Of a result, and what `generate` goes on with; one line says that they take memory."""
    model = llama().eval()
    assert model.config.use_cache  # type: ignore[union-attr]
    given = [one["input_ids"] for one in text_batches(num_steps=3)]
    step = LayerMajor(model)
    with torch.no_grad():
        theirs = [model(one) for one in given]
    mine = step.evaluate(given, lambda model, one: model(one))
    assert caplog.text.count("use_cache=False") == 1
    for one, other in zip(mine, theirs, strict=True):
        assert type(one) is type(other) and torch.equal(one.logits, other.logits)
        for layer, expected in zip(
            one.past_key_values.layers, other.past_key_values.layers, strict=True
        ):
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)


class Layer(torch.nn.Module):
    """Is called with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **cache: Any) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_known_by_each_of_its_names(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers 5.24 renamed the argument."""

    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x, **{name: []})
        return x

    model = torch.nn.Sequential(Layer(), Layer()).eval()
    LayerMajor(model).evaluate([torch.randn(2, 4) for _ in range(2)], call)
    assert caplog.text.count("use_cache=False") == 1


@pytest.mark.parametrize("samples", [False, True])
def test_generate_gives_the_same_tokens(samples: bool, tmp_path: Path) -> None:
    model = llama().eval()
    given = [one["input_ids"][:, :4] for one in text_batches(num_steps=3)]

    def generated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model.generate(tokens, max_new_tokens=4, do_sample=samples)

    torch.manual_seed(5)
    theirs = [generated(model, one) for one in given], torch.get_rng_state()
    with offload_parameters(model, tmp_path) as parameters:
        step = LayerMajor(model)
        step.evaluate(given[:1], generated)
        before = parameters.statistics["read_bytes"]
        torch.manual_seed(5)
        mine = step.evaluate(given, generated), torch.get_rng_state()
        read = parameters.statistics["read_bytes"] - before
        once = parameters.statistics["parameter_bytes"]
        assert samples or read <= 1.05 * 4 * once  # once for each token of all batches
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
