# SPDX-License-Identifier: Apache-2.0
"""Takes over what a layer saved, at the end of its forward pass: `LayerCapture`.

The engine calls it with the layer's inputs and outputs. It walks the part of the autograd graph
between them and registers hooks on each saved tensor that moves; it leaves the others as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from megatron.offload.activations.capture.hooks import (
    PLAIN_TORCH,
    Move,
    Packed,
    SavedTensorHooks,
    needed_together,
)
from megatron.offload.activations.saved.autograd_graph import (
    is_kept_by_accumulator,
    node_of,
    saved_tensors_between,
)
from megatron.offload.activations.saved.cache import TensorCache
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.view import SavedView
from megatron.offload.activations.step_context import StepContext
from megatron.offload.activations.transfer.write_batch import WriteBatch
from megatron.offload.activations.transfer.writer import Writer


class LayerCapture:
    """Registers hooks on what layers saved, and submits it in one batch a layer.

    Args:
        hooks: for the saved tensors.
        cache: knows what can move.
        writer: writes what a layer saved, in one batch.
        step: where compute is.
    """

    def __init__(
        self, hooks: SavedTensorHooks, cache: TensorCache, writer: Writer, step: StepContext
    ) -> None:
        # Types of nodes that save copies of their own, see Note [Leaves] in `autograd_graph.py`.
        self.copying_nodes: set[type] = set()
        self._hooks = hooks
        self._cache = cache
        self._writer = writer
        self._step = step

    def capture(
        self,
        scope: Scope,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        *,
        captured: Iterable[Any] = (),
        recomputes: bool = False,
        batch: WriteBatch | None = None,
    ) -> None:
        """Takes over what a layer saved, at the end of its forward pass.

        Args: those of `OffloadEngine.capture`.
        """
        outputs = list(outputs)
        is_timed = self._hooks.is_timed
        with self._hooks.time() if is_timed else contextlib.nullcontext(), PLAIN_TORCH():
            inputs = list(inputs)
            found = self._find(scope, outputs, inputs, captured)
            starts: set[int] = set()
            if recomputes:
                starts = {t.untyped_storage()._cdata for t in inputs if _wants_gradient(t)}
            needed_whole = needed_together([(tensor, storage) for _, tensor, storage in found])
            to_write = WriteBatch(self._writer) if batch is None else batch
            outer, self._step.scope = self._step.scope, scope
            try:
                for saved, tensor, storage in found:
                    move = None
                    if not recomputes or storage._cdata in starts:
                        whole = storage._cdata in needed_whole
                        again = None if recomputes else to_write
                        move = self._hooks.find_move(tensor, storage, again, whole=whole)
                    if move is not None:
                        self._register(saved, tensor, move, to_write)
                        continue
                    if self._step.observer is not None:
                        self._step.observer.stayed(scope, storage)
                    if self._hooks.recipes is not None:
                        self._hooks.keep(tensor)  # autograd holds it; a recipe may be of it
            finally:
                if batch is None:  # else the layer goes on
                    self._hooks.end_layer()
                self._step.scope = outer
                if batch is None:
                    to_write.submit()
                else:
                    batch.submit_if_enough()
        if self._step.tracer is not None:
            self._step.tracer.sample_memory()
        if (sampler := self._step.sampler) is not None:
            sampler.layer_ended(scope, outputs)

    def _find(
        self,
        scope: Scope,
        outputs: Iterable[torch.Tensor],
        inputs: list[torch.Tensor],
        captured: Iterable[Any],
    ) -> list[tuple[Any, torch.Tensor, torch.UntypedStorage]]:
        """What the layer saved and can move: saved tensor, tensor, storage."""
        # The schedule holds a stage's input until its backward: moving it would free nothing.
        leaves = [t for t in inputs if node_of(t) is None and t.layout is torch.strided]
        held = {t.untyped_storage()._cdata for t in leaves}
        found = []
        for node, saved, tensor in saved_tensors_between(outputs, inputs, captured):
            if tensor is None:
                is_ours = saved.unpack_hook == self._hooks.unpack
                self._step.statistics.already_hooked += not is_ours
                continue
            storage = self._cache.movable_if_saved(tensor)
            if storage is None or storage._cdata in held:
                continue
            if type(node) in self.copying_nodes or not is_kept_by_accumulator(tensor):
                found.append((saved, tensor, storage))
            elif self._step.observer is not None:
                self._step.observer.stayed(scope, storage)
        return found

    def _register(self, saved: Any, tensor: torch.Tensor, move: Move, batch: WriteBatch) -> None:
        """Hooks one saved tensor: autograd calls `pack` at once, and `unpack` in backward."""
        # The node keeps `pack` alive, and the tensor keeps the node alive. So `pack` must not keep
        # the tensor.
        for_once = [(tensor, move, batch)]
        views: list[SavedView] = []

        def pack(same: torch.Tensor) -> Packed:
            tensor, move, batch = for_once.pop()
            view = self._hooks.take(same, move, batch)
            views.append(view)
            if is_kept_by_accumulator(tensor):  # of a copying node: it alone refers to the leaf
                tensor.data = tensor.new_empty(()).expand(tensor.shape)
            return view

        saved.register_hooks(pack, self._hooks.unpack)
        # Only now: what autograd is about to hook cannot be read.
        self._hooks.note(tensor, views.pop())


def _wants_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.layout is torch.strided
