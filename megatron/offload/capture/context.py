# SPDX-License-Identifier: Apache-2.0
"""The hooks for models without layers that can be captured one by one: `SavingContext`.

The engine makes one for each `with` block around a forward pass. Autograd then calls the hooks in
the middle of an operation, and this decides when what they took may be written. It starts nothing.
"""

from __future__ import annotations

import torch

from megatron.offload.capture.hooks import Packed, SavedTensorHooks
from megatron.offload.transfer.batch import Batch


class SavingContext(torch.autograd.graph.saved_tensors_hooks):
    """The hooks as a context. What operations saved is written when the next one saves.

    Not before: autograd hands some tensors over before the operation has filled them (the noise of
    `rrelu`). And not before it is worth to wake the thread that starts transfers.

    Args:
        hooks: take a tensor and bring it back.
        batch: gets what operations save.
    """

    def __init__(self, hooks: SavedTensorHooks, batch: Batch) -> None:
        super().__init__(self._pack, hooks.unpack)
        self._hooks = hooks
        self._batch = batch
        self._node_number = -1  # of the operation that saved last

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.submit()

    def submit(self) -> None:
        """All operations so far have ended: what they saved may be written."""
        self._batch.submit()

    def _pack(self, tensor: torch.Tensor) -> Packed:
        node_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if node_number != self._node_number:
            self._batch.submit_if_enough()
            self._node_number = node_number
        return self._hooks.pack(tensor, self._batch)
