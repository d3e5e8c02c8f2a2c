# SPDX-License-Identifier: Apache-2.0
"""`offload_activations` for Lightning's Trainer: `OffloadCallback`, which the Trainer calls.

Note [Callbacks that a tuner sets aside]
Lightning's tuners (LearningRateFinder, BatchSizeFinder) train with callbacks of their own, and an
error in there is told to these: the finder of learning rates does not put the others back. Its
Trainer then ends, and before that its strategy, however the training ends. So while a training is
under way, the callback is called before its strategy ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from megatron.offload.integration.hook import Hook, do_nothing
from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.torch.trainer_callback import TrainerOffload


class OffloadCallback(TrainerOffload, Callback):
    """Moves what a LightningModule's models save for backward to SSDs or host memory.

        Trainer(..., callbacks=[OffloadCallback("/mnt/nvme0")])

    It takes what `offload_activations` takes; with `optimizer_states=True` the optimizers' states
    move as well, or with a dict of `offload_optimizer`'s settings, with `parameters=True` or a dict
    of `offload_parameters`' the parameters of layers; with `frozen_cache="/mnt/nvme0/features"`
    frozen parts are computed once (`cache_frozen`). The modules that `training_step` calls are the
    models: attributes of the LightningModule. Each training batch is logged as
    `offload/offloaded_gib`, `offload/stall_s`, `offload/peak_activation_gib` and so on, see
    `TrainerFigures.take`; `metrics_file` gets a line for each optimizer step, with the loss that
    Lightning optimizes. A line at the beginning and one at the end, in Lightning's own log, say
    what was found and what it came to.
    """

    _num_steps = 0  # of the optimizers, so far
    _leave_strategy: Callable[[], None] = staticmethod(do_nothing)  # that is under way

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to offload."""
        device = trainer.strategy.root_device
        self.open(pl_module, trainer.optimizers, device, counts_tokens=False)
        self._end_before(trainer.strategy)
        self._num_steps = trainer.global_step
        rank_zero_info(self.opening())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to measure a batch."""
        self.begin_step(batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures what forward and backward took."""
        if self.figures is not None:
            self.figures.end_passes()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Logs what the batch moved."""
        is_known = pl_module.automatic_optimization and isinstance(outputs, Mapping)
        self.add_micro_batch(outputs.get("loss") if is_known else None)  # divided by their number
        has_stepped = trainer.global_step > self._num_steps
        self._num_steps = trainer.global_step
        self.end_step(self._num_steps if has_stepped else None)
        if self.figures is not None:
            for name, value in self.figures.take().items():
                pl_module.log(name, value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says so if a cache of frozen parts has found nothing in the epoch."""
        self.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends offload, before the Trainer moves optimizers' states, and says what moved."""
        self.end_training(rank_zero_info, is_first=trainer.is_global_zero)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends offload where no step was left to train, of which `on_train_end` is not told."""
        self.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends offload."""
        self.close()

    def close(self) -> None:
        """Ends it; the handle still has its statistics and its summary."""
        self._leave_strategy()
        self._leave_strategy = do_nothing
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        """As of `TrainerOffload`."""
        return super().__getstate__() | {"_leave_strategy": do_nothing}

    def _end_before(self, strategy: Any) -> None:
        """See Note [Callbacks that a tuner sets aside]."""
        teardown = strategy.teardown

        def end() -> None:
            try:
                self.close()
            finally:
                teardown()

        self._leave_strategy = put(strategy, "teardown", Hook(end, teardown))
