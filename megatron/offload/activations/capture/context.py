# SPDX-License-Identifier: Apache-2.0
"""The hooks for models without layers that can be captured one by one: `SavingContext`.

The engine makes one for each `with` block around a forward pass. Autograd calls the hooks in the
middle of an operation; this class decides when what they took may be written. It starts nothing.

Note [Hooks of others]
Autograd calls only the hooks that a thread has entered last. Those of torch's checkpoint
(`use_reentrant=False`) count the tensors that they get, and find by that count what the operations
save when the forward pass runs again in backward. Our hooks are not entered then. If we took
tensors in between, or if other operations ran the second time, the checkpoint would return other
tensors, mostly of the same shapes: wrong gradients and no error. So we take nothing that is saved
within the hooks of others.

Note [Captured graphs]
A CUDA graph records addresses and the events of its stream, but none of our copies. So while a
stream is captured, what operations save stays in memory, and we record no event on that stream.
What earlier operations saved is submitted after the capture.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.offload.activations.capture.hooks import PLAIN_TORCH, Packed, SavedTensorHooks
from megatron.offload.activations.capture.not_traced import not_traced
from megatron.offload.activations.transfer.write_batch import WriteBatch
from megatron.offload.device.cuda import is_captured


class SavingContext(torch.autograd.graph.saved_tensors_hooks):
    """The hooks as a context. What operations saved is written when the next one saves.

    Not before: autograd hands some tensors over before the operation has filled them (the noise of
    `rrelu`). And not before it is worth to wake the thread that starts transfers.

    It may end where other hooks have been pushed onto it since, or in another thread than it began
    in. It takes off its own hooks only; where it cannot, they do nothing until they are called. It
    may be ended again, where an interrupt came into its end.

    Args:
        hooks: take a tensor and bring it back.
        batch: gets what operations save.
    """

    _is_over = _has_ended = False  # its end has begun, and has come to its own end

    def __init__(self, hooks: SavedTensorHooks, batch: WriteBatch) -> None:
        super().__init__(self._timed_pack if hooks.is_timed else self._pack, hooks.unpack)
        self._begin(hooks, batch)

    def _begin(self, hooks: SavedTensorHooks, batch: WriteBatch) -> None:
        """In the thread of the forward pass."""
        self._hooks = hooks
        self._batch = batch
        self._node_number = -1  # of the operation that saved last
        self._captures = False  # whether a graph captures it
        self._first_number = _next_number()

    def __exit__(self, *error: object) -> None:
        if self._has_ended:
            return
        self._is_over = True
        self._take_off()
        self._hooks.end_layers()
        self.submit()
        self._has_ended = True

    def submit(self) -> None:
        """All operations so far have ended: what they saved may be written."""
        self._batch.submit()

    def _take_off(self) -> None:
        """Pops the hooks from the stack of this thread, and pushes again what is above them."""
        autograd: Any = torch._C._autograd
        above = []
        while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            if hooks[0] is self.pack_hook:
                break
            above.append(hooks)
        while above:
            autograd._push_saved_tensors_default_hooks(*above.pop())

    @not_traced
    def _timed_pack(self, tensor: torch.Tensor) -> Packed:
        with self._hooks.time():
            return self._pack(tensor)

    @not_traced
    def _pack(self, tensor: torch.Tensor) -> Packed:
        if self._is_over:
            self._take_off()
            with PLAIN_TORCH():
                return self._hooks.keep(tensor)
        node_number: int = _next_number()
        if node_number != self._node_number:
            self._captures = is_captured()  # Note [Captured graphs]; all of an operation, or none
            if not self._captures:
                self._batch.submit_if_enough()
            self._node_number = node_number
        if self._captures:
            return self._hooks.keep_captured(tensor)
        return self._hooks.pack(tensor, self._batch, self._first_number)


# Of the operation that comes next in this thread, or is under way.
_next_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def others_take_what_is_saved() -> bool:
    """Whether this thread is within hooks of others; see Note [Hooks of others]."""
    autograd: Any = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True)  # while tracing too
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavingContext)
