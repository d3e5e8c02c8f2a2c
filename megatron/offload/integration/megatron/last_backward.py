# SPDX-License-Identifier: Apache-2.0
"""When the last backward pass of a step begins: `LastBackward`, which stands before other hooks.

Reads of what the optimizer's step needs first can begin then. The passes are counted, so that it
is right for every schedule, with activation offload and without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron.offload.integration.megatron.decorators import Function, TrainingHooks


class LastBackward:
    """Passes all calls on, and reports the last backward pass: a `decorators.TrainingHooks`.

    Args:
        begins: called just before the last backward pass of a step.
        num_chunks: model chunks of this rank; each has a backward pass for each micro-batch.
        hooks: run what passes here; None: it runs as it is.
    """

    def __init__(
        self, begins: Callable[[], None], num_chunks: int, hooks: TrainingHooks | None = None
    ) -> None:
        self._begins = begins
        self._num_chunks = num_chunks
        self._hooks = hooks
        self._signature: inspect.Signature | None = None  # of Megatron's forward step
        self._num_left = 0  # backward passes of this step; 0: none has begun

    def layer(self, forward: Function, layer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a layer's forward."""
        if self._hooks is None:
            return forward(layer, *args, **kwargs)
        return self._hooks.layer(forward, layer, args, kwargs)

    def forward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the forward pass of a micro-batch; the first one of a step says how many follow."""
        if torch.is_grad_enabled() and not self._num_left:
            self._signature = self._signature or inspect.signature(step)
            named = self._signature.bind(*args, **kwargs).arguments
            self._num_left = int(named["num_microbatches"]) * self._num_chunks
        if self._hooks is None:
            return step(*args, **kwargs)
        return self._hooks.forward_step(step, args, kwargs)

    def evaluation_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a forward pass of an evaluation as it is."""
        return step(*args, **kwargs)

    def backward_step(self, step: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the backward pass of a micro-batch."""
        if self._num_left == 1:
            self._begins()
        self._num_left = max(0, self._num_left - 1)
        if self._hooks is None:
            return step(*args, **kwargs)
        return self._hooks.backward_step(step, args, kwargs)

    def clear(self) -> None:
        """Forgets a step that did not come to its end."""
        self._num_left = 0
