# SPDX-License-Identifier: Apache-2.0
"""What happens around the forward and backward pass of each micro-batch: `ScheduleHooks`.

All three schedules (no pipelining, 1F1B, interleaved) look `forward_step` and `backward_step` up in
their module at each call. It tells the engine which pass runs and, from the order of passes that
the schedule keeps to, which backward pass comes next: its last layers are brought back while the
stage still sends, waits to receive or does nothing at all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.save_order import SaveOrder
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.planner.profile.pipeline_schedule import (
    Pass,
    PipelinePosition,
    pipeline_schedule,
)
from megatron.offload.planner.profile.profiler import Profiler


class ScheduleHooks:
    """Runs the passes of a stage for an engine.

    Args:
        engine: is told of them.
        settings: the model's `TransformerConfig`.
        end_forward: gets what each forward pass returned, at its end.
        profiler: is told of them too; None: nothing measures them.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        settings: Any,
        end_forward: Callable[[list[torch.Tensor]], None],
        profiler: Profiler | None = None,
    ) -> None:
        self._engine = engine
        self._end_forward = end_forward
        self._profiler = profiler
        self._settings = settings
        self._signature: inspect.Signature | None = None  # of Megatron's forward step
        # What is left of this step's passes, the next one first. None: no step has begun.
        self._order: list[Pass] | None = None
        self._chunk_with_loss = -1  # -1: not on this stage
        self._save_orders: dict[
            tuple[int, int], SaveOrder
        ] = {}  # of forward passes, by chunk, micro-batch
        # Backward names no micro-batch. The schedules keep each output tensor object until then
        # (they may swap its data), so its identity tells which forward pass it belongs to.
        self._by_output: dict[int, tuple[torch.Tensor, tuple[int, int]]] = {}

    def forward_step(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the forward pass of a micro-batch, and notes its save order for backward."""
        if not torch.is_grad_enabled():
            return step(*args, **kwargs)
        self._signature = self._signature or inspect.signature(step)
        named = self._signature.bind(*args, **kwargs).arguments
        place = (named.get("vp_stage") or 0, named.get("current_microbatch") or 0)
        if self._order is None:
            position = pipeline_position(self._settings)
            self._order = pipeline_schedule(position, named["num_microbatches"])
            is_last = position.stage == position.num_stages - 1
            self._chunk_with_loss = position.num_chunks - 1 if is_last else -1
        measured = _nothing if self._profiler is None else self._profiler.forward
        with measured(*place), self._engine.forward(Scope(*place)) as save_order:
            result = step(*args, **kwargs)
            output = _first_tensor(result[0])
            if self._engine.sampler is not None and output is not None:
                self._engine.sampler.note_outside([output])
            self._end_forward([] if output is None else [output])
        if output is not None:
            self._save_orders[place] = save_order
            self._by_output[id(output)] = (output, place)
        self._passed(Pass(False, *place))
        return result

    def backward_step(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the backward pass of the micro-batch whose output is among the arguments."""
        output = _first_tensor(kwargs["output_tensor"] if "output_tensor" in kwargs else args[1])
        _, place = self._by_output.pop(id(output), (None, None))
        save_order = self._save_orders.pop(place, None) if place is not None else None
        measured = _nothing if self._profiler is None or place is None else self._profiler.backward
        with (
            measured(*(place or ())),
            self._engine.backward(save_order if save_order is not None else SaveOrder()),
        ):
            result = step(*args, **kwargs)
        if place is not None:
            self._passed(Pass(True, *place))
        return result

    def clear(self) -> None:
        """Forgets forward passes whose backward never came (an exception, an early exit)."""
        self._save_orders.clear()
        self._by_output.clear()
        self._order = None

    def _passed(self, done: Pass) -> None:
        """A pass is over: the next one, if it is a backward pass, may be prepared."""
        if not self._order or self._order.pop(0) != done:
            self._order = []  # another schedule than those: no guesses for the rest of the step
        if self._order and self._order[0].is_backward:
            _, chunk, micro_batch = self._order[0]
            save_order = self._save_orders.get((chunk, micro_batch))
            if save_order is not None:
                self._engine.prefetch(save_order, opens_at_once=chunk != self._chunk_with_loss)


def pipeline_position(settings: Any) -> PipelinePosition:
    """This rank's position in the pipeline.

    Args:
        settings: the model's `TransformerConfig`.
    """
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    return PipelinePosition(
        num_stages,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        getattr(settings, "microbatch_group_size_per_vp_stage", None) or num_stages,
    )


def _nothing(*_: int) -> contextlib.AbstractContextManager[None]:
    """In place of a profiler."""
    return contextlib.nullcontext()


def _first_tensor(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, list | tuple) else output
    return first if isinstance(first, torch.Tensor) else None
