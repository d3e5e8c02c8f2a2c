# SPDX-License-Identifier: Apache-2.0
"""`OffloadCallback(..., frozen_cache=DIR)` in transformers' Trainer: the same bits, and hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.frozen_training import llama, rows_of_text

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.integration.huggingface import OffloadCallback  # noqa: E402

ROWS = 8


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens; `changes` ones are never the same."""

    def __init__(self, *, changes: bool = False) -> None:
        self._rows, self._changes, self._asked = rows_of_text(ROWS), changes, 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._asked += 1
        row = {name: one[index] for name, one in self._rows.items()}
        if self._changes:
            row["input_ids"] = (row["input_ids"] + self._asked) % 64
        return row


def trained(folder: Path, callback: OffloadCallback | None, **changes: Any) -> tuple[Any, Any]:
    """Log lines and weights."""
    checkpointing = changes.pop("gradient_checkpointing", False)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=checkpointing,
    )
    trainer = transformers.Trainer(
        llama(),
        arguments,
        train_dataset=Rows(**changes),
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    names = ("loss", "grad_norm")
    lines = [[line.get(name) for name in names] for line in trainer.state.log_history]
    return lines, [one.detach().clone() for one in trainer.model.parameters()]


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"]
)
def test_a_frozen_prefix_is_computed_once_while_activations_move(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folders = [tmp_path / name for name in ("activations", "features", "again")]
    for folder in folders:
        folder.mkdir()
    kept = trained(tmp_path / "off", None, **changes)
    for first_epoch in (0, ROWS):
        callback = OffloadCallback(folders[0], min_bytes="1KiB", frozen_cache=folders[1])
        cached = trained(tmp_path / "on", callback, **changes)
        assert cached[0] == kept[0] and all(map(torch.equal, cached[1], kept[1]))
        assert callback.frozen is not None and callback.offload is not None
        assert callback.frozen.statistics["hit_rows"] == first_epoch + 2 * ROWS
        assert callback.offload.statistics["offloaded_bytes"] > 0
    callback = OffloadCallback(
        mode="off", frozen_cache={"directory": folders[2], "budget_bytes": "1KiB"}
    )
    assert trained(tmp_path / "on", callback, **changes)[0] == kept[0]
    assert callback.frozen is not None and callback.frozen.statistics["hit_rows"] == 0


def test_a_data_set_that_is_augmented_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = OffloadCallback(mode="off", frozen_cache=tmp_path)
    trained(tmp_path, callback, changes=True)
    messages = [one for one in caplog.messages if "an epoch has ended in which none" in one]
    assert len(messages) == 2  # the first epoch finds nothing anyway
    assert "augmented" in messages[0]
