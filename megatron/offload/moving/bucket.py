# SPDX-License-Identifier: Apache-2.0
"""Tensors of a few parameters that move together, as one storage: `Bucket`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron.offload.device.device import Device
from megatron.offload.moving.layout import Layout, Name
from megatron.offload.moving.memory import FreshMemory
from megatron.offload.moving.storage import Ended, MovingStorage

P = TypeVar("P")  # a parameter, or its size


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
        self.forget()  # first: an interrupt leaves no bytes under another layout
        self.layout = layout
        self.hold(FreshMemory(storage), layout.num_bytes)

    def forget(self) -> None:
        """Drops its tensors."""
        self.hold(None, 0)
        self.layout = None


def divided(params: Sequence[P], bytes_of: Callable[[P], int], bucket_bytes: int) -> list[list[P]]:
    """Parameters in runs, each for a bucket.

    Args:
        params: in order.
        bytes_of: gives what a parameter has in its bucket, in bytes.
        bucket_bytes: of a run at most, or of the only parameter in it.
    """
    runs: list[list[P]] = []
    room_bytes = 0
    for param in params:
        num_bytes = bytes_of(param)
        if not runs or num_bytes > room_bytes:
            runs.append([])
            room_bytes = bucket_bytes
        runs[-1].append(param)
        room_bytes -= num_bytes
    return runs
