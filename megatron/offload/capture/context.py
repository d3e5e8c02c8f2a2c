# SPDX-License-Identifier: Apache-2.0
"""The hooks for models without layers that can be captured one by one: `SavingContext`.

The engine makes one for each `with` block around a forward pass. Autograd then calls the hooks in
the middle of an operation, and this decides when what they took may be written. It starts nothing.
"""

from __future__ import annotations

import torch

from megatron.offload.capture.hooks import Packed, SavedTensorHooks
from megatron.offload.transfer.writer import Outgoing, Writer


class SavingContext(torch.autograd.graph.saved_tensors_hooks):
    """The hooks as a context. What operations saved is written when the next one saves.

    Not before: autograd hands some tensors over before the operation has filled them (the noise of
    `rrelu`). And not before it is worth to wake the thread that starts transfers.

    Args:
        hooks: take a tensor and bring it back.
        writer: gets what an operation saved.
        enough_bytes: to be handed over, which takes the time of several saves.
    """

    def __init__(self, hooks: SavedTensorHooks, writer: Writer, enough_bytes: int) -> None:
        super().__init__(self._pack, hooks.unpack)
        self._hooks = hooks
        self._writer = writer
        self._enough_bytes = enough_bytes
        self._saved: list[Outgoing] = []
        self._num_bytes = 0  # of these
        self._node_number = -1  # of the operation that saved last

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._submit()

    def _pack(self, tensor: torch.Tensor) -> Packed:
        node_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if node_number != self._node_number:
            if self._num_bytes >= self._enough_bytes:
                self._submit()
            self._node_number = node_number
        before = len(self._saved)
        packed = self._hooks.pack(tensor, self._saved)
        if len(self._saved) > before:  # by one: a tensor has one storage
            self._num_bytes += self._saved[-1].num_bytes
        return packed

    def _submit(self) -> None:
        saved, self._saved, self._num_bytes = self._saved, [], 0
        self._writer.submit(saved)
