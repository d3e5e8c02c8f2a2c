# SPDX-License-Identifier: Apache-2.0
"""`offload_activations` for transformers' Trainer and what is built on it: `OffloadCallback`.

The Trainer calls it. It offloads from the beginning of a training to its end and adds what moved to
the Trainer's log lines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from megatron.offload.integration.torch.trainer_callback import TrainerOffload

logger = logging.getLogger(__name__)

_OF_AUTO = ("plans", "measured_peak_bytes", "predicted_peak_bytes")


class OffloadCallback(TrainerOffload, TrainerCallback):
    """Moves what the Trainer's model saves for backward to SSDs or host memory.

        trainer = Trainer(..., callbacks=[OffloadCallback("/mnt/nvme0")])

    It takes what `offload_activations` takes; with `optimizer_states=True` the optimizer's states
    move as well, or with a dict of `offload_optimizer`'s settings. Log lines get
    `offload/offloaded_bytes`, `offload/stall_s` and others: the mean of the optimizer steps since
    the last line, all micro-batches of a step together. They are in the log history, in what the
    Trainer prints and in TensorBoard's files.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(directory, **settings)
        self._sums: dict[str, float] = {}  # since the last log line
        self._num_steps = 0  # of the optimizer, in the sums
        self._writer: Any = None  # of TensorBoard's files

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begins to offload."""
        self._close_writer()
        self.open(kwargs["model"], [kwargs["optimizer"]])
        self._sums, self._num_steps = {}, 0
        if "tensorboard" in args.report_to and state.is_world_process_zero:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=_board_of(args))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts a micro-batch that is not the last one of its optimizer step."""
        self._count()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts the last micro-batch of an optimizer step."""
        self._count()
        self._num_steps += 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds to a training's log line; those of evaluation and the last one are left alone."""
        if logs is None or "loss" not in logs or not self._num_steps or self.offload is None:
            return
        added = {name: one / self._num_steps for name, one in self._sums.items()}
        last = self.offload.statistics
        added |= {f"offload/{name}": last[name] for name in _OF_AUTO if name in last}
        self._sums, self._num_steps = {}, 0
        logs.update(added)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(added)
        # TensorBoard's own callback comes before this one and has seen the line already.
        if self._writer is not None:
            for name, value in added.items():
                self._writer.add_scalar(name, value, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends offload and says what the steps moved."""
        self._close_writer()
        self.close()
        if self.offload is not None and state.is_world_process_zero:
            logger.info("%s", self.offload.summary())

    def _count(self) -> None:
        for name, value in self.logged().items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _board_of(args: TrainingArguments) -> str:
    """The folder of TensorBoard's files. The Trainer's own callback has just made it."""
    named = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if named:
        return os.path.expanduser(named)
    runs = Path(args.output_dir or ".") / "runs"
    made = [one for one in runs.glob("*") if one.is_dir()] if runs.is_dir() else []
    return str(max(made, key=lambda one: one.stat().st_mtime, default=runs / "offload"))
