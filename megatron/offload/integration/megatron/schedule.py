# SPDX-License-Identifier: Apache-2.0
"""Tells the engine which micro-batch runs forward or backward: `wrap_schedule`.

`install` calls it. All three schedules (no pipelining, 1F1B, interleaved) look `forward_step` and
`backward_step` up in their module at each call, so replacing the two names there is enough.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.offload.engine import OffloadEngine
from megatron.offload.restore.prefetch import Tape
from megatron.offload.saved.scope import Scope


class TapesByOutput:
    """Finds, at backward, what the forward pass that made this output saved.

    The schedules keep each output tensor object until its backward (they may swap its data), so
    its identity is the link between the two calls, which share no micro-batch number.
    """

    def __init__(self) -> None:
        self._tapes: dict[int, tuple[torch.Tensor, Tape]] = {}

    def remember(self, output: Any, tape: Tape) -> None:
        """Notes the tape of a forward pass under its output."""
        tensor = _first_tensor(output)
        if tensor is not None:
            self._tapes[id(tensor)] = (tensor, tape)

    def take(self, output: Any) -> Tape:
        """The tape of this output; an empty one if its forward pass was not seen."""
        tensor = _first_tensor(output)
        entry = self._tapes.pop(id(tensor), None)
        return entry[1] if entry is not None else Tape()

    def clear(self) -> None:
        """Forgets forward passes whose backward never came (an exception, an early exit)."""
        self._tapes.clear()


def wrap_schedule(engine: OffloadEngine, tapes: TapesByOutput) -> Callable[[], None]:
    """Puts `engine.forward` and `engine.backward` around the schedules' two steps.

    Returns:
        A function that restores Megatron's own steps.
    """
    original_forward, original_backward = schedules.forward_step, schedules.backward_step
    signature = inspect.signature(original_forward)

    @functools.wraps(original_forward)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_forward(*args, **kwargs)
        named = signature.bind(*args, **kwargs).arguments
        scope = Scope(
            chunk=named.get("vp_stage") or 0,
            micro_batch=named.get("current_microbatch") or 0,
        )
        with engine.forward(scope) as tape:
            result = original_forward(*args, **kwargs)
        tapes.remember(result[0], tape)
        return result

    @functools.wraps(original_backward)
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        with engine.backward(tapes.take(output_tensor)):
            return original_backward(input_tensor, output_tensor, *args, **kwargs)

    schedules.forward_step = forward_step
    schedules.backward_step = backward_step

    def restore() -> None:
        schedules.forward_step = original_forward
        schedules.backward_step = original_backward

    return restore


def _first_tensor(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, list | tuple) else output
    return first if isinstance(first, torch.Tensor) else None
