# SPDX-License-Identifier: Apache-2.0
"""Tensors of a few parameters that move together, as one storage: `Bucket`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.offload.device.device import Device
from megatron.offload.moving.layout import Layout, Name
from megatron.offload.moving.memory import FreshMemory
from megatron.offload.moving.storage import Ended, MovingStorage


class Bucket(MovingStorage):
    """Optimizer states or gradients of a few parameters.

    Args:
        params: at least one.
        device: in whose memory the tensors are used.
        ended: see `MovingStorage`.

    Attributes:
        devices: of the parameters, between steps.
        layout: where each tensor lies; None: the bucket has no tensors.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], device: Device, ended: Ended | None = None
    ) -> None:
        super().__init__(device, ended)
        self.params = list(params)
        self.devices = [param.device for param in self.params]
        self.layout: Layout | None = None

    @property
    def views(self) -> dict[Name, torch.Tensor]:
        """Its tensors, by name; it is in memory, or has none."""
        if self.layout is None:
            return {}
        assert self.storage is not None
        return self.layout.views(self.storage)

    def fill(self, layout: Layout, storage: torch.UntypedStorage) -> None:
        """Replaces its tensors by these."""
        self.hold(FreshMemory(storage), layout.num_bytes)
        self.layout = layout

    def forget(self) -> None:
        """Drops its tensors."""
        self.hold(None, 0)
        self.layout = None
