# SPDX-License-Identifier: Apache-2.0
"""Who hears of everything that a layer saves: `Observer`. The engine tells, a profiler listens."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.offload.activations.saved.scope import Scope


class Observer(Protocol):
    """Called by the thread that computes, in the hot path."""

    def moves(self, scope: Scope, num_bytes: int) -> None:
        """A storage was saved for the first time and goes to a tier.

        Args:
            scope: that saved it.
            num_bytes: that it takes in memory, as `stayed` tells too; of a mask less moves.
        """
        ...

    def stayed(self, scope: Scope, storage: torch.UntypedStorage) -> None:
        """A storage was saved, perhaps not for the first time, and stays in device memory."""
        ...
