# SPDX-License-Identifier: Apache-2.0
"""`offload_activations` for transformers' Trainer and what is built on it: `OffloadCallback`.

The Trainer calls it. It offloads from the beginning of a training to its end and adds what moved to
the Trainer's log lines.

Note [The first of the callbacks]
The Trainer gives a log line to its callbacks one after the other, the reporters (W&B, MLflow,
TensorBoard, ...) before those of its argument `callbacks`, and no hook of it comes earlier. So when
a training begins, the callback puts itself in front of all others. No argument of a hook leads to
their list; the handler that has it is the caller. It gets a new list: it is running through the
old one.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from tqdm import tqdm
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from megatron.offload.integration.huggingface.evaluation import EvaluationInUnits
from megatron.offload.integration.torch.trainer_callback import TrainerOffload

logger = logging.getLogger(__name__)


class OffloadCallback(TrainerOffload, TrainerCallback):
    """Moves what the Trainer's model saves for backward to SSDs or host memory.

        trainer = Trainer(..., callbacks=[OffloadCallback("/mnt/nvme0")])

    It takes what `offload_activations` takes; with `optimizer_states=True` the optimizer's states
    move as well, or with a dict of `offload_optimizer`'s settings, with `parameters=True` or a dict
    of `offload_parameters`' the parameters of layers; with `frozen_cache="/mnt/nvme0/features"`
    frozen parts are computed once (`cache_frozen`). Log lines get `offload/offloaded_gib`,
    `offload/stall_s`, `offload/peak_activation_gib` and others, see `TrainerFigures.take`: of the
    optimizer steps since the last line, all micro-batches of a step together. All reporters of the
    Trainer get them, its log history and what it prints. `metrics_file` gets a line for each
    optimizer step, with the loss that the Trainer logs after it, if it logs one. A line at the
    beginning and one at the end say what was found and what it came to, unless `log_level` is above
    `warning`.
    """

    def evaluate_in_units(
        self, trainer: Any, *, batches: int = 8, units: int | None = None
    ) -> EvaluationInUnits:
        """Has the Trainer's evaluation run each unit of layers for several batches at a time.

            callback.evaluate_in_units(trainer)

        Parameters that are on a tier are then read once for all of these, see
        `LayerMajor.evaluate`. Losses, predictions and metrics have the same bits.

        Args:
            trainer: evaluates and predicts; it need not train.
            batches: so many at a time; the predictions of all of them are in memory.
            units: of layers; None: each layer is one.

        Returns:
            A handle, whose `close()` ends it.

        Raises:
            ConfigurationError: there are no batches to run together.
        """
        return EvaluationInUnits(trainer, batches, units, lambda: self.offload)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begins to offload."""
        self._come_first()
        self.open(kwargs["model"], [kwargs["optimizer"]], args.device)
        _say(self.opening(), args, state)
        if args.torch_compile and (sentence := self.told_of_compilation()):
            logger.warning("%s", sentence)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins to measure an optimizer step."""
        self.begin_step()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts a micro-batch that is not the last one of its optimizer step."""
        self.add_micro_batch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures what forward and backward took."""
        if self.figures is not None:
            self.figures.end_passes()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts the last micro-batch of an optimizer step."""
        self.add_micro_batch()
        self.end_step(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Says so if a cache of frozen parts has found nothing in the epoch."""
        self.end_epoch()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds to a training's log line; those of evaluation and the last one are left alone."""
        if logs is None or "loss" not in logs or self.figures is None:
            return
        if self.log is not None:
            self.log.note(state.global_step, logs)
        added = self.figures.take()
        logs.update(added)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(added)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends offload and says what the steps moved."""
        self.end_training(
            lambda line: _say(line, args, state), is_first=state.is_world_process_zero
        )

    def _come_first(self) -> None:
        """See Note [The first of the callbacks]."""
        frame = inspect.currentframe()
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, CallbackHandler):
                others = [one for one in caller.callbacks if one is not self]
                caller.callbacks = [self, *others]
                return
            frame = frame.f_back
        logger.warning(
            "activation offload: no Trainer has called this callback, so reporters before it do "
            "not see what it adds to log lines"
        )


def _say(line: str, args: TrainingArguments, state: TrainerState) -> None:
    """Prints as the Trainer prints its log lines: Python's logging shows warnings alone."""
    if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
        tqdm.write(line)
