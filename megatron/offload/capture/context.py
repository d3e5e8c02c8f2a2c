# SPDX-License-Identifier: Apache-2.0
"""The hooks for models without layers that can be captured one by one: `SavingContext`.

The engine makes one for each `with` block around a forward pass. Autograd then calls the hooks in
the middle of an operation, and this decides when what they took may be written. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.offload.capture.hooks import SavedTensorHooks


class SavingContext(torch.autograd.graph.saved_tensors_hooks):
    """The hooks as a context. What an operation saved is written when the next one saves.

    Autograd hands some tensors over before the operation has filled them (the noise of `rrelu`).

    Args:
        hooks: take a tensor and bring it back.
        collecting: while it lasts, what they take goes to the list that it is given.
        hand_over: has such a list written.
    """

    def __init__(
        self,
        hooks: SavedTensorHooks,
        collecting: Callable[[list[Any]], AbstractContextManager[None]],
        hand_over: Callable[[list[Any]], None],
    ) -> None:
        super().__init__(self._pack, hooks.unpack)
        self._hooks = hooks
        self._collecting = collecting
        self._hand_over_all = hand_over
        self._saved: list[Any] = []
        self._node_number = -1  # of the operation that saved last

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hand_over()

    def _pack(self, tensor: torch.Tensor) -> Any:
        node_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if node_number != self._node_number:
            self._hand_over()
            self._node_number = node_number
        with self._collecting(self._saved):
            return self._hooks.pack(tensor)

    def _hand_over(self) -> None:
        saved, self._saved = self._saved, []
        self._hand_over_all(saved)
