# SPDX-License-Identifier: Apache-2.0
"""`offload_activations` for Lightning's Trainer: `OffloadCallback`, which the Trainer calls."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from megatron.offload.integration.torch.trainer_callback import TrainerOffload

logger = logging.getLogger(__name__)


class OffloadCallback(TrainerOffload, Callback):
    """Moves what a LightningModule's models save for backward to SSDs or host memory.

        Trainer(..., callbacks=[OffloadCallback("/mnt/nvme0")])

    It takes what `offload_activations` takes; with `optimizer_states=True` the optimizers' states
    move as well, or with a dict of `offload_optimizer`'s settings. The modules that `training_step`
    calls are the models: attributes of the LightningModule. Each training batch is logged as
    `offload/offloaded_bytes`, `offload/stall_s` and so on.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to offload."""
        self.open(pl_module, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Logs what the batch moved."""
        for name, value in self.logged().items():
            pl_module.log(name, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends offload, before the Trainer moves optimizers' states, and says what moved."""
        self.close()
        if self.offload is not None and trainer.is_global_zero:
            logger.info("%s", self.offload.summary())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends offload."""
        self.close()
