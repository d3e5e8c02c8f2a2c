# SPDX-License-Identifier: Apache-2.0
"""Tells an engine of the passes of a layer-major step: `EnginePasses`.

Each unit counts as a model chunk, as with virtual pipelining: a micro-batch in it has a forward and
a backward pass of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.layer_major.boundary import Boundary
from megatron.offload.planner.profile.profiler import Profiler


class EnginePasses:
    """Tells an engine of passes: a `layer_major.unit_passes.UnitPasses`.

    Args:
        engine: None: nothing is offloaded.
        hooks_tensors: each forward pass runs in the engine's context for saved tensors; else layers
            are captured one by one.
        around_forward: gives a context around each forward pass; None: there is no such context.
        unsynchronized: gives a context around backward passes after which gradients are not
            complete; None: there is no such context.
        profiler: is told of all passes too; None: nothing measures them.

    Attributes:
        around_backward: gives a context around each backward pass, of its unit and whether it is
            the last one of that unit.
    """

    def __init__(
        self,
        engine: OffloadEngine | None,
        *,
        hooks_tensors: bool,
        around_forward: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        unsynchronized: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self._engine = engine
        self._hooks_tensors = hooks_tensors
        self._around_forward = around_forward or contextlib.nullcontext
        self._unsynchronized = unsynchronized
        self._profiler = profiler
        self.around_backward: Callable[[int, bool], contextlib.AbstractContextManager[Any]] = (
            lambda unit, is_last: contextlib.nullcontext()
        )
        self._save_orders: dict[tuple[int, int], SaveOrder] = {}

    @property
    def boundary(self) -> Boundary | None:
        """Where tensors wait between units; None: in memory."""
        return None if self._engine is None else self._engine.tensor_swapper

    @contextlib.contextmanager
    def forward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        """Around a forward pass."""
        if self._engine is None:
            yield
            return
        with contextlib.ExitStack() as contexts:
            if self._profiler is not None:
                contexts.enter_context(self._profiler.forward(unit, micro_batch))
            save_order = contexts.enter_context(self._engine.forward(Scope(unit, micro_batch)))
            self._save_orders[unit, micro_batch] = save_order
            contexts.enter_context(self._around_forward())
            yield

    @contextlib.contextmanager
    def whole_forward(self) -> Iterator[Callable[[], None]]:
        """Around all of a micro-batch's forward passes, in the thread in which they run."""
        if self._engine is None or not self._hooks_tensors:
            yield lambda: None
            return
        hooks = self._engine.saved_tensors_hooks()
        with hooks:
            yield hooks.submit

    @contextlib.contextmanager
    def backward(self, unit: int, micro_batch: int, *, is_last: bool) -> Iterator[None]:
        """Around a backward pass."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self.around_backward(unit, is_last))
            if self._unsynchronized is not None and not is_last:
                contexts.enter_context(self._unsynchronized())
            if self._profiler is not None:
                contexts.enter_context(self._profiler.backward(unit, micro_batch))
            if self._engine is not None:
                save_order = self._save_orders.pop((unit, micro_batch), None) or SaveOrder()
                contexts.enter_context(self._engine.backward(save_order))
            yield

    def prepare_backward(self, unit: int, micro_batch: int) -> None:
        """Reads ahead for the next backward pass, which goes straight to the unit's layers."""
        save_order = self._save_orders.get((unit, micro_batch))
        if self._engine is not None and save_order is not None:
            self._engine.prefetch(save_order, opens_at_once=True)

    def elsewhere(
        self, leaf: torch.Tensor
    ) -> contextlib.AbstractContextManager[Callable[[], torch.Tensor | None]]:
        """See `UnitPasses`: gradients are nowhere else."""
        return contextlib.nullcontext(lambda: None)

    def clear(self) -> None:
        """Forgets passes that did not come to their end."""
        self._save_orders.clear()
