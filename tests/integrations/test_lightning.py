# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback, and the same bits."""

from __future__ import annotations

import json
import pickle
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megatron.offload import offload_parameters
from megatron.offload.integration.open_streams import OPEN
from megatron.offload.integration.torch.parameter_offload import ParameterOffload
from tests.support.same_training import digest

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder  # noqa: E402

from megatron.offload.integration.lightning import OffloadCallback  # noqa: E402
from tests.support.text_models import llama, text_batches  # noqa: E402


class Trained(lightning.LightningModule):
    """Calls its model in `training_step`, never its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model: Any = llama(attention_dropout=0.1)
        self.losses: list[str] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(digest(loss))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("valid", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(
    folder: Path, callbacks: list[Any], module: Trained | None = None, **settings: Any
) -> tuple[Trained, Any]:
    module = module or Trained()
    trainer = trainer_of(folder, callbacks, **settings)
    torch.manual_seed(6)
    batches = torch.utils.data.DataLoader(text_batches(), batch_size=None)
    trainer.fit(module, batches, torch.utils.data.DataLoader(text_batches(9, 2), batch_size=None))
    return module, trainer


def trainer_of(folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    return lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **settings,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}],
    ids=["", "accumulating", "autocast"],
)
def test_lightning_comes_to_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = fitted(tmp_path, [], **settings)
    callback = OffloadCallback(tmp_path, min_bytes="4KiB")
    found, trainer = fitted(tmp_path, [callback], **settings)
    assert found.losses == expected.losses and len(found.losses) == 8
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert digest(one) == digest(other)
    logged = {name: float(one) for name, one in trainer.callback_metrics.items()}
    assert logged["offload/offloaded_gib"] * 2**30 > 1e5
    assert 0 < logged["offload/peak_activation_gib"] < logged["offload/peak_device_gib"]
    assert callback.offload is not None and callback.offload.engine is None  # closed


@pytest.mark.parametrize("directly", [False, True], ids=["its model", "its own forward"])
def test_the_metrics_file_has_a_line_for_each_optimizer_step(
    directly: bool, tmp_path: Path
) -> None:
    class Noted(Trained):
        values: ClassVar[list[float]] = []

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self if directly else self.model)(**batch).loss
            self.values.append(float(loss.detach()))
            return loss

    Noted.values.clear()
    file = tmp_path / "metrics.jsonl"
    callback = OffloadCallback(tmp_path, min_bytes="4KiB", metrics_file=file)
    fitted(tmp_path, [callback], Noted(), accumulate_grad_batches=3)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    # Of the four batches of an epoch the last one is a step by itself, divided by three like all.
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    parts = [Noted.values[index:end] for index, end in ((0, 3), (3, 4), (4, 7), (7, 8))]
    assert [line["loss"] for line in found] == pytest.approx([sum(one) / 3 for one in parts])
    of_one = text_batches()[0]["input_ids"].numel()
    for line, part in zip(found, parts, strict=True):
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(len(part) * of_one)
        assert 0 < line["peak_activation_bytes"] < line["peak_device_bytes"]
    moved = [line["offload"]["offloaded_bytes"] for line in found]
    assert moved == [3 * moved[1], moved[1]] * 2 and moved[1] > 1e5


def test_the_optimizers_states_move_too_and_keep_their_bits(tmp_path: Path) -> None:
    expected, _ = fitted(tmp_path, [])
    states = {"bucket_bytes": "64KiB", "window_bytes": "192KiB"}
    callback = OffloadCallback(tmp_path, optimizer_states=states, min_bytes="4KiB")
    found, trainer = fitted(tmp_path, [callback])
    assert found.losses == expected.losses
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert digest(one) == digest(other)
    state = trainer.optimizers[0].state.values()
    assert all(one["exp_avg"].device.type == "cpu" for one in state)  # closed


def test_a_fit_that_has_nothing_left_to_train_ends_offload(tmp_path: Path) -> None:
    """Lightning calls `on_fit_start` and `on_fit_end` then, and nothing between them."""
    callback = OffloadCallback(tmp_path, optimizer_states=True, parameters=True)
    module, _ = fitted(tmp_path, [callback], limit_train_batches=0)
    assert callback.offload is not None and callback.offload.engine is None and not callback.others
    for one, other in zip(module.parameters(), Trained().parameters(), strict=True):
        assert digest(one) == digest(other)


def test_a_trainer_is_pickled_with_the_settings_of_its_callback(tmp_path: Path) -> None:
    callback = OffloadCallback(tmp_path, optimizer_states=True, parameters=True, min_bytes="4KiB")
    expected, trainer = fitted(tmp_path, [callback])
    trainer = pickle.loads(pickle.dumps(trainer))
    (another,) = (one for one in trainer.callbacks if isinstance(one, OffloadCallback))
    assert another.offload is None and callback.offload is not None
    found, _ = fitted(tmp_path, [another])
    assert found.losses == expected.losses and another.offload is not None


class FindsRateLater(LearningRateFinder):  # type: ignore[misc]
    """As Lightning's documentation has it: not before the training but within."""

    def on_fit_start(self, *_: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Trained) -> None:
        self.lr_find(trainer, pl_module)


class FindsBatchLater(BatchSizeFinder):  # type: ignore[misc]
    def on_fit_start(self, *_: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Trained) -> None:
        self.scale_batch_size(trainer, pl_module)


@pytest.mark.parametrize("tuner", [FindsRateLater, FindsBatchLater, None])
def test_a_training_that_failed_within_a_tuner_too_leaves_nothing_open(
    tuner: type[Any] | None, tmp_path: Path
) -> None:
    class Fails(Trained):
        batch_size = 2
        lr = 1e-3

        def train_dataloader(self) -> Any:
            rows = [{name: one[0] for name, one in batch.items()} for batch in text_batches()]
            return torch.utils.data.DataLoader(rows, self.batch_size)  # type: ignore[arg-type]

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if len(self.losses) == 2:
                raise ValueError("in the third step")
            return super().training_step(batch, index)

    callback = OffloadCallback(tmp_path, optimizer_states=True, parameters=True, min_bytes="4KiB")
    module = Fails()
    tuners = [] if tuner is None else [tuner()]
    with pytest.raises(ValueError, match="in the third step"):
        trainer_of(tmp_path, [callback, *tuners], limit_val_batches=0).fit(module)
    assert callback.offload is not None and callback.offload.engine is None and not callback.others
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
    assert not list(OPEN.trainers) and not list(OPEN.parameters)


def test_a_strategy_that_is_pickled_while_it_trains_is_pickled_without_us(tmp_path: Path) -> None:
    class Pickles(lightning.Callback):  # type: ignore[misc]
        copied: Any = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.copied = pickle.loads(pickle.dumps(trainer.strategy))

    pickles = Pickles()
    fitted(tmp_path, [OffloadCallback(tmp_path), pickles], limit_train_batches=1)
    assert pickles.copied.teardown == types.MethodType(
        type(pickles.copied).teardown, pickles.copied
    )


class Parameters(lightning.Callback):  # type: ignore[misc]
    """Has parameters on an SSD while a model is fitted."""

    handle: ParameterOffload
    read_bytes = 0

    def on_fit_start(self, trainer: Any, pl_module: Trained) -> None:
        self.handle = offload_parameters(pl_module, trainer.default_root_dir)

    def on_fit_end(self, trainer: Any, pl_module: Trained) -> None:
        self.read_bytes = int(self.handle.statistics["read_bytes"])
        self.handle.close()


def test_parameters_wait_on_an_ssd_and_keep_their_bits(tmp_path: Path) -> None:
    """Lightning's optimizers step with a closure, which runs forward, backward and clips."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    expected, _ = fitted(tmp_path, [], **settings)
    callback = Parameters()
    found, _ = fitted(tmp_path, [callback], **settings)
    assert found.losses == expected.losses and callback.read_bytes > 0
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert digest(one) == digest(other)


@pytest.mark.parametrize("parameters", [False, True], ids=["states", "states and parameters"])
def test_a_training_that_stopped_goes_on_to_the_weights_of_one_that_did_not(
    parameters: bool, tmp_path: Path
) -> None:
    """Lightning moves states to their device behind `load_state_dict`."""

    class Resumed(Trained):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.model = llama()  # Lightning's checkpoints have no generator for dropout

    def fit(num_epochs: int, callbacks: list[Any], checkpoint: Path | None = None) -> Resumed:
        module = Resumed()
        trainer = lightning.Trainer(
            max_epochs=num_epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks,
        )
        batches = torch.utils.data.DataLoader(text_batches(), batch_size=None)
        trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=False)
        return module

    def callbacks() -> list[Any]:
        states = {"bucket_bytes": "64KiB", "window_bytes": "64KiB"}
        offload = OffloadCallback(tmp_path, optimizer_states=states, min_bytes="4KiB")
        return [Parameters(), offload] if parameters else [offload]

    saving = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", filename="one")
    expected = fit(2, [])
    fit(1, [*callbacks(), saving])
    found = fit(2, callbacks(), tmp_path / "saved" / "one.ckpt")
    assert found.losses == expected.losses[4:]
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert digest(one) == digest(other)


@pytest.mark.slow
def test_averages_of_weights_are_the_same_beside_states_that_move(tmp_path: Path) -> None:
    """An exponential average while the model trains, a stochastic one at its end."""

    def kinds() -> list[Any]:
        return [
            lightning.callbacks.EMAWeightAveraging(),
            lightning.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1),
        ]

    for index in range(2):
        expected, _ = fitted(tmp_path, [kinds()[index]])
        states = {"bucket_bytes": "64KiB", "window_bytes": "64KiB"}
        offload = OffloadCallback(tmp_path, optimizer_states=states, min_bytes="4KiB")
        found, _ = fitted(tmp_path, [offload, kinds()[index]])
        assert found.losses == expected.losses
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert digest(one) == digest(other)
