# SPDX-License-Identifier: Apache-2.0
"""What hears of everything that a layer saves: `Observer`. The engine calls, a profiler listens."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from megatron.offload.activations.saved.scope import Scope


class Observer(Protocol):
    """The threads that compute call it for each saved tensor, so it must be cheap."""

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

    def replays(
        self, scope: Scope, storage: torch.UntypedStorage, copied_bytes: int, codes_bytes: int
    ) -> None:
        """A storage was saved for the first time; backward computes it again, see `recipes.py`.

        Args:
            scope: that saved it.
            storage: which nothing keeps from now on.
            copied_bytes: of parameters and small buffers, that are held until then.
            codes_bytes: that a codec has made of it; 0: it is computed of other tensors.
        """
        ...

    def saves_for_replay(self, scope: Scope, num_bytes: int) -> None:
        """A storage of so many bytes is saved only so that others can be computed again of it.

        It moves or stays as well, which the observer hears too.
        """
        ...

    def encoding(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """Around what a codec does with a storage in forward, if it does anything."""
        ...

    def replaying(self, scope: Scope, *, decodes: bool) -> contextlib.AbstractContextManager[None]:
        """Around the computation of a storage in backward; `scope` is that which saved it.

        Args:
            scope: that saved it.
            decodes: it is decoded.
        """
        ...
