# SPDX-License-Identifier: Apache-2.0
"""What callbacks of trainers share: `TrainerOffload` opens with a training and closes with it.

The callbacks for transformers and Lightning are made of it; it calls `offload_activations` and
`offload_optimizer`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.offload.integration.open_streams import OPEN
from megatron.offload.integration.torch.door import offload_activations
from megatron.offload.integration.torch.offload import ActivationOffload
from megatron.offload.integration.torch.optimizer import OptimizerOffload, offload_optimizer
from megatron.offload.values import paths_of

logger = logging.getLogger(__name__)

# The offload of an interrupted training, which no trainer ends at a Ctrl-C, would refuse that of
# the next one, which usually has another callback.

# Of a step's counters, those that trainers log: each as `offload/NAME`.
LOGGED = ("offloaded_bytes", "written_bytes", "read_bytes", "stall_s", "write_wait_s")


class TrainerOffload:
    """A training's offload, which a callback opens and closes.

    Args:
        directory: as of `offload_activations`, like everything else.
        optimizer_states: the optimizers' states move too; settings of `offload_optimizer` by name,
            which moves them to the same directory unless one is among them.
        settings: of `offload_activations`, by name.

    Attributes:
        offload: the handle of the training under way, or of the last one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        *,
        optimizer_states: bool | Mapping[str, Any] = False,
        **settings: Any,
    ) -> None:
        self.offload: ActivationOffload | None = None
        # As they are called now: the working directory may be another one when training begins.
        self._directory = directory = None if directory is None else paths_of(directory)
        self._settings = settings
        self._of_states: dict[str, Any] | None = None
        if optimizer_states is not False:
            own = {} if optimizer_states is True else dict(optimizer_states)
            self._of_states = {"directory": directory, **own}
        self._optimizers: list[OptimizerOffload] = []

    def open(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Offloads this model, and ends what a training of it that failed has left open."""
        self.close()
        modules = set(model.modules())
        for other in OPEN.trainers:
            if other.offload is not None and other.offload.is_of(modules):
                logger.warning(
                    "activation offload: a training of %s began before and has not ended; the one "
                    "that begins now ends its offload",
                    type(model).__name__,
                )
                other.close()
        OPEN.trainers.add(self)
        self.offload = offload_activations(model, self._directory, **self._settings)
        if self._of_states is not None:
            for optimizer in optimizers:
                self._optimizers.append(offload_optimizer(optimizer, **self._of_states))

    def close(self) -> None:
        """Ends it; the handle still has its statistics and its summary."""
        OPEN.trainers.discard(self)
        if self.offload is not None:
            self.offload.close()
        while self._optimizers:
            self._optimizers.pop().close()

    def logged(self) -> dict[str, float]:
        """Those counters of the last step that trainers log; empty before the first."""
        statistics = self.offload.statistics if self.offload is not None else {}
        return {f"offload/{name}": float(statistics[name]) for name in LOGGED if name in statistics}
