# SPDX-License-Identifier: Apache-2.0
"""What hears of everything that a layer saves: `Observer`. The engine calls, a profiler listens."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.offload.activations.saved.scope import Scope


class Observer(Protocol):
    """The thread that computes calls it for each saved tensor, so it must be cheap."""

    def moves(self, scope: Scope, num_bytes: int) -> None:
        """A storage was saved for the first time and goes to a tier.

        Args:
            scope: that saved it.
            num_bytes: that it takes in memory, as `stayed` counts too; a mask moves fewer.
        """
        ...

    def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
        """A storage was saved, perhaps not for the first time, and stays in device memory."""
        ...
