# SPDX-License-Identifier: Apache-2.0
"""What integrations have around the passes of a micro-batch: `UnitPasses`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.offload.layer_major.boundary import Boundary

_Context = contextlib.AbstractContextManager[Any]


class UnitPasses(Protocol):
    """What is around the passes of a micro-batch through a unit; `LayerMajorSchedule` enters it."""

    @property
    def boundary(self) -> Boundary | None:
        """Where tensors wait between two units; None: in memory."""
        ...

    def forward(self, unit: int, micro_batch: int, *, is_last: bool) -> _Context:
        """Around a forward pass; after the last one another unit comes next."""
        ...

    def whole_forward(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Around the forward passes of a micro-batch through all units, in their thread.

        Entered once per micro-batch, because saved-tensor hooks are a per-thread stack and a pause
        may happen inside a checkpoint's hooks. That thread calls what it yields before each pause.
        """
        ...

    def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> _Context:
        """Around a backward pass; the last one of its unit completes the unit's gradients."""
        ...

    def prepare_backward(self, unit: int, micro_batch: int) -> None:
        """The next backward pass is this one."""
        ...

    def elsewhere(
        self, leaf: torch.Tensor
    ) -> contextlib.AbstractContextManager[Callable[[], torch.Tensor | None]]:
        """See `leaf_gradients.Elsewhere`."""
        ...
