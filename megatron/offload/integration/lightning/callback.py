# SPDX-License-Identifier: Apache-2.0
"""The door for Lightning's Trainer: `OffloadCallback`. What it does: `integration/torch/`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from megatron.offload.integration.torch.door import offload_activations
from megatron.offload.integration.torch.offload import ActivationOffload

logger = logging.getLogger(__name__)

_LOGGED = ("offloaded_bytes", "written_bytes", "read_bytes", "stall_s", "write_wait_s")


class OffloadCallback(Callback):
    """Moves what a LightningModule's models save for backward to SSDs or host memory.

        Trainer(..., callbacks=[OffloadCallback("/mnt/nvme0")])

    The modules that `training_step` calls are the models: attributes of the LightningModule. Each
    training batch is logged as `offload/offloaded_bytes`, `offload/stall_s` and so on.

    Args:
        directory: as of `offload_activations`, like everything else.
        settings: of `offload_activations`, by name.

    Attributes:
        offload: the handle of the training under way, or of the last one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> None:
        self.offload: ActivationOffload | None = None
        self._directory = directory
        self._settings = settings

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the door."""
        self._close()
        self.offload = offload_activations(pl_module, self._directory, **self._settings)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Logs what the batch moved."""
        statistics = self.offload.statistics if self.offload is not None else {}
        for name in _LOGGED:
            if name in statistics:
                pl_module.log(f"offload/{name}", float(statistics[name]))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the door and says what the steps moved."""
        self._close()
        if self.offload is not None and trainer.is_global_zero:
            logger.info("%s", self.offload.summary())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Closes the door."""
        self._close()

    def _close(self) -> None:
        if self.offload is not None:
            self.offload.close()
